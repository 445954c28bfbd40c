"""Functions of other libraries, replaced by others around them, for as long as the process lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vram_guard.patching import replace_attributes


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Call another function in place of one, whose original is its first argument; where there is none, do nothing."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    replace_attributes(owner, {name: wrapped})


def made_by_script(frame: Any) -> bool:
    """True for a caller that is neither Accelerate nor torch."""
    return not str(frame.f_globals.get("__name__", "")).startswith(("accelerate", "torch."))
