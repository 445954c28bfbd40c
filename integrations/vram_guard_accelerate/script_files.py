"""The user's own files that a script imports, and whether the script's own code is what asks for something."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeAlias

from vram_guard.user_code import is_users_file

#: A file's size and time of change (ns); None where there is none.
FileState: TypeAlias = list[int] | None


def state_of(name: str) -> FileState:
    """The state of a file now."""
    try:
        state = os.stat(name)  # noqa: PTH116 - asked for while a script's paths lead nowhere
    except (OSError, ValueError):
        return None
    return [state.st_size, state.st_mtime_ns]


def imported_files() -> dict[str, FileState]:
    """The files outside libraries that this process has imported, by name."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {name: state_of(name) for name in names if isinstance(name, str) and is_users_file(name)}
    return {name: state for name, state in found.items() if state is not None}


def asked_by_script() -> bool:
    """True if the script's own code is what asks now, through parts of Python at most."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - who asks is the question
    passed = {"multiprocess", "vram_guard", "vram_guard_accelerate"}
    while frame is not None and _package_of(frame) in (sys.stdlib_module_names - {"__main__"}) | passed:
        frame = frame.f_back
    return frame is not None and is_users_file(frame.f_code.co_filename)


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
