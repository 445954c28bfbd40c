"""The user's own files that a script imports."""

from __future__ import annotations

import os
import sys
from typing import TypeAlias

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
