"""Run a script as Python itself would: as ``__main__``, with its own arguments and its own folder on the path."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str], *, module: bool) -> None:
    """Run ``script arguments...``; returns when the script does. Whatever it raises is raised."""
    script = command[0]
    if module:
        sys.argv = list(command)
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
