"""Attributes of single objects, replaced and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


def replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on one object; returns the function that undoes it.

    Undone, the object holds what it held itself: nothing, where it had the attribute from its class.
    """
    before = vars(owner).get(name, _ABSENT)
    vars(owner)[name] = value

    def undo() -> None:
        if before is _ABSENT:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before

    return undo
