"""Functions of other libraries, replaced by others around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Put what ``around`` makes of a function in its place, under its name; where there is none, do nothing."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(around(original)))


def made_by_script(frame: Any) -> bool:
    """True for a caller that is neither Accelerate nor torch."""
    return not str(frame.f_globals.get("__name__", "")).startswith(("accelerate", "torch."))
