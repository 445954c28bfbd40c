"""Run a script as Python itself would: as ``__main__``, with its own arguments and its own folder on the path."""

from __future__ import annotations

import atexit
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from vram_guard.call_room import with_room
from vram_guard.watch.process_groups import end_process_groups


def run(command: Sequence[str], *, module: bool) -> None:
    """Run ``script arguments...``; returns when the script does. Whatever it raises is raised."""
    sys.argv = list(command)
    if module:
        sys.path[0] = str(Path.cwd())
        with_room(runpy.run_module, command[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(command[0]).resolve().parent)
    with_room(runpy.run_path, command[0], run_name="__main__")


def end_process_groups_at_exit() -> None:
    """End process groups that are alive after the script's own exit handlers. Call it before the script starts.

    FSDP2 needs a process group, which Accelerate makes and scripts rarely end; see
    :mod:`vram_guard.watch.process_groups`.
    """
    atexit.register(end_process_groups)  # handlers run in reverse order: this one is the last
