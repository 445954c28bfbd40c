"""Programs that a script starts before ``prepare``: what they do beside writing files cannot be taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vram_guard.forks.side_effects import way
from vram_guard.language import _
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run.results import stopped
from vram_guard_accelerate.dry_run.subprocess_policy import around_starts, only_reads, shown
from vram_guard_accelerate.script_files import asked_by_script


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
