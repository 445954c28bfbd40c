"""What a script does before ``prepare`` beside writing files: programs and connections, which cannot be taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from vram_guard.forks.side_effects import way
from vram_guard.language import _
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate._script_files import asked_by_script
from vram_guard_accelerate.dry_run._subprocess_policy import around_starts, only_reads, shown
from vram_guard_accelerate.dry_run.results import stopped

#: Clients through which a script sends what it has to say. Libraries that fetch models and data by them are not in it.
_CLIENTS: Final = frozenset(
    {
        *("requests", "urllib3", "httpx", "httpcore", "aiohttp", "anyio", "websocket", "websockets", "paramiko"),
        *("redis", "pymysql", "psycopg", "psycopg2", "pymongo", "boto3", "botocore", "slack_sdk"),
    }
)


class EarlyPrograms:
    """Programs that a script starts before it trains: their files are thrown away, nothing else is."""

    def __init__(self) -> None:
        self._shown: dict[str, None] = {}

    def watch(self) -> None:
        """From now on."""
        around_starts(self._start)
        for name in ("multiprocessing.util", "multiprocess.util"):  # a copy of the process writes as the process does
            module = sys.modules.get(name)
            wrap(module, "spawnv_passfds", self._spawned, optional=True)

    def _spawned(self, original: Any, path: Any, argv: Any, passed: Any) -> Any:
        return self._start(partial(original, path, argv, passed), argv)

    def _start(self, start: Callable[[], Any], command: Any, in_shell: bool = False) -> Any:
        if only_reads(command, in_shell=in_shell):
            return start()
        if way() == "python":
            stopped(
                _(
                    "it starts a program ({command}), whose files this system cannot keep from the disk: it has "
                    "neither an overlay for this user nor Landlock",
                    command=shown(command),
                )
            )
        if asked_by_script():
            self._shown[shown(command)] = None
        return start()

    @property
    def note(self) -> str:
        """What became of those that the script itself has started; "" where it has started none."""
        if not self._shown:
            return ""
        commands = ", ".join(self._shown)
        if way() == "landlock":
            return _(
                "programs that the script started before it trains could write nothing: {commands}", commands=commands
            )
        return _(
            "programs that the script started before it trains have run, and will again when it is started; only the "
            "files that they wrote are thrown away: {commands}",
            commands=commands,
        )


class EarlyConnections:
    """The connections of one script."""

    def __init__(self) -> None:
        self._resolved: tuple[str, object] = ("", None)
        self._places: dict[str, None] = {}

    def watch(self) -> None:
        """From now on. Permanently: the process has no other purpose."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo":
            self._resolved = (str(values[0]), values[1])
        if event != "socket.connect" or not asked_by_script(_CLIENTS):
            return
        address = values[1]
        if isinstance(address, tuple):
            host, port = address[:2]
            name, wanted = self._resolved
            self._places[f"{name if wanted == port else host}:{port}"] = None
        else:
            self._places[str(address)] = None

    @property
    def note(self) -> str:
        """Where the script itself has connected to; "" where it has not."""
        if not self._places:
            return ""
        return _(
            "what the script has sent to {places} before it trains was really sent, and will be again when it is "
            "started",
            places=", ".join(self._places),
        )
