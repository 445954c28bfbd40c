"""Programs that a script starts before ``prepare``: they run on a disk that they cannot write to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vram_guard.language import _
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate._script_files import asked_by_script
from vram_guard_accelerate.dry_run._subprocess_policy import around_starts, only_tells, shown
from vram_guard_accelerate.dry_run._write_protection import rights, write_protected


class EarlyPrograms:
    """Programs that a script starts before it trains: what they would write could not be taken back.

    Args:
        scratch: a folder that is removed with the dry run, for their temporary files.
        allowed: other folders that they may write to.
    """

    def __init__(self, scratch: Path, allowed: Sequence[Path]) -> None:
        self._scratch = scratch
        self._allowed = (scratch, *allowed)
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
        if only_tells(command, in_shell=in_shell):
            return start()
        if asked_by_script():
            self._shown[shown(command)] = None
        if not rights():
            return start()
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self._scratch)
        try:
            return write_protected(start, self._allowed)
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before

    @property
    def note(self) -> str:
        """What became of those that the script itself has started; "" where it has started none."""
        if not self._shown:
            return ""
        commands = ", ".join(self._shown)
        if rights():
            return _(
                "programs that the script started before it trains could write nothing: {commands}", commands=commands
            )
        return _(
            "what programs that the script started before it trains have written stays, for this system cannot keep "
            "them from it: {commands}",
            commands=commands,
        )
