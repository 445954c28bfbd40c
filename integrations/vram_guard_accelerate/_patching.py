"""Functions of other libraries, replaced by others around them, for as long as the process lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vram_guard.patching import replace_attributes


def wrap(owner: Any, name: str, replacement: Callable[..., Any], *, optional: bool = False) -> None:
    """Call another function in place of one, whose original is its first argument.

    Args:
        owner: of the function; None where its library is not loaded, which only what is optional may be.
        name: of the function.
        replacement: called in its place.
        optional: do nothing where there is no such function, on this system or in this release of a library.

    Raises:
        AttributeError: there is no such function. A patch that is left out would let a dry run act for real.
    """
    if optional and getattr(owner, name, None) is None:
        return
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    replace_attributes(owner, {name: wrapped})


def made_by_script(frame: Any) -> bool:
    """True for a caller that is neither Accelerate nor torch."""
    return not str(frame.f_globals.get("__name__", "")).startswith(("accelerate", "torch."))
