"""The user's own files: those that a script imports, and the lines of them that messages name."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, TypeAlias

import vram_guard

#: A file's size and time of change (ns); None where there is none.
FileState: TypeAlias = list[int] | None

_OWN = tuple(str(Path(name).parent) + os.sep for name in (vram_guard.__file__, __file__))


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
    found = {name: state_of(name) for name in names if isinstance(name, str) and is_users(name)}
    return {name: state for name, state in found.items() if state is not None}


def asked_by_script(between: frozenset[str] = frozenset()) -> bool:
    """True if the script's own code is what asks now, through parts of Python or these packages at most."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - who asks is the question
    passed = between | {"multiprocess", "vram_guard", "vram_guard_accelerate"}
    while frame is not None and _package_of(frame) in (sys.stdlib_module_names - {"__main__"}) | passed:
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def place_of_frame(frame: Any) -> str:
    """The innermost line outside libraries, as "train.py, line 12"; "" if there is none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def place_of_error(error: BaseException, script: str) -> str:
    """The innermost line outside libraries, or of the script, that an error passed; "" if there is none."""
    own = Path(script).resolve()
    lines = [
        f"{Path(entry.filename).name}, line {entry.lineno}"
        for entry in traceback.extract_tb(error.__traceback__)
        if is_users(entry.filename) or Path(entry.filename).resolve() == own
    ]
    return lines[-1] if lines else ""


def is_users(name: str) -> bool:
    """True for files outside libraries and this package."""
    libraries = ("<", sys.base_prefix + os.sep, *_OWN)
    return f"{os.sep}site-packages{os.sep}" not in name and not name.startswith(libraries)
