"""Attributes of modules, classes and objects that are replaced for a while and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MISSING = object()


def replace_attributes(target: Any, values: Mapping[str, Any]) -> Callable[[], None]:
    """Set attributes on ``target`` itself; the result puts its old ones back.

    An attribute that ``target`` inherited, or did not have, is deleted again: a class that inherited it inherits it
    again, and an instance has its class's. A property is set back to the value that it had.
    """
    before = {name: _held(target, name) for name in values}

    def undo() -> None:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(target, name, value)
            elif name in vars(target):
                delattr(target, name)

    try:
        for name, value in values.items():
            setattr(target, name, value)
    except BaseException:
        undo()
        raise
    return undo


def _held(target: Any, name: str) -> Any:
    if isinstance(getattr(type(target), name, None), property):
        return getattr(target, name)
    return vars(target).get(name, _MISSING)


@contextmanager
def replaced(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """``target`` has these attributes inside the block, and exactly its old ones afterwards."""
    undo = replace_attributes(target, values)
    try:
        yield
    finally:
        undo()
