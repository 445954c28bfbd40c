"""Errors of the user's own code, as a command says them."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

from vram_guard.capture.object_reference import NAMED_FILES
from vram_guard.language import _


def failure_of_users_code(error: Exception) -> str | None:
    """One line for an error that the user's own code has passed on; None where none of it was running.

    The line of code is the innermost one outside libraries: what a model raises is found there, whatever raised it.
    """
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_users(frame)
    ]
    if not lines:
        return None
    return _(
        "{line} fails: {problem}. It ran on tensors without values, at first with batches of a few samples; --verbose "
        "shows the traceback",
        line=lines[-1],
        problem=f"{type(error).__name__}: {error}".rstrip("."),
    )


def _is_users(frame: FrameType) -> bool:
    """True for code outside libraries, Python's own and ours."""
    name = frame.f_code.co_filename
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package == "__main__" or package.startswith(NAMED_FILES):
        return True
    of_library = name.startswith("<") or f"{os.sep}site-packages{os.sep}" in name
    return not of_library and not package.startswith("vram_guard") and package not in sys.stdlib_module_names
