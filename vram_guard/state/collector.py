"""Python's collector of cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container, Iterator
from types import FrameType
from typing import Any

#: What is frozen in this process: how many objects there were when they were listed, and their identities.
_frozen: tuple[int, frozenset[int]] = (0, frozenset())
#: Objects that frozen ones hold, by their identities.
_held: dict[int, Any] = {}


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """While the block runs, cycles are not collected.

    When one dies depends on the collector's counters, by which two traces must not differ; and where hundreds of
    thousands of values are made, it looks at all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def objects_before() -> frozenset[int]:
    """The identities of all objects that may hold others, those too that were frozen when this process was copied.

    One that has died since may have left its number to another: see :func:`is_held_by`.
    """
    if gc.get_freeze_count() > _frozen[0]:
        with _unfrozen():
            pass
    return _frozen[1] | set(map(id, gc.get_objects()))


class ObjectsKept:
    """As :func:`objects_before`, and as long as this lives none of them dies: no number goes to another object.

    Not for traces, whose memory is free when the step lets go of it. Where objects are frozen, all that are there are
    afterwards.
    """

    def __init__(self) -> None:
        is_frozen = gc.get_freeze_count() > 0
        with collector_paused():
            gc.unfreeze()
            self._objects = gc.get_objects()
            if is_frozen:
                gc.freeze()
        self._identities = frozenset(map(id, self._objects))

    def __contains__(self, identity: object) -> bool:
        return identity in self._identities


def is_held_by(value: Any, objects: Container[int], but: object = None) -> bool:
    """True if an object with one of these identities refers to a value, and another one of them to that object.

    A new object may have the number of one that has died; that two of them meet is not reckoned with.

    Args:
        value: that is held.
        objects: identities, see :func:`objects_before`. Frames do not count.
        but: an object that does not count either.
    """
    if id(value) in _held or _is_held_twice(value, objects, but):
        return True
    if not gc.get_freeze_count():
        return False
    with _unfrozen():
        is_held = _is_held_twice(value, objects, but)
    if is_held:
        _held[id(value)] = value
    return is_held


def _is_held_twice(value: Any, objects: Container[int], but: object) -> bool:
    first = _holders(value, objects, but)
    for one in first:  # noqa: SIM110 - a generator would itself refer to it, and might have the number of one of them
        if _holders(one, objects, first):
            return True
    return False


def _holders(of: Any, objects: Container[int], but: object) -> list[Any]:
    """Those of these objects that refer to another."""
    return [
        one for one in gc.get_referrers(of) if one is not but and id(one) in objects and not isinstance(one, FrameType)
    ]


@contextlib.contextmanager
def _unfrozen() -> Iterator[None]:
    """While the block runs, the collector knows of the frozen objects; it is paused, so that no finalizer is run.

    Afterwards all that is there is frozen, and cycles among it are never let go of: this is done once for each process,
    and once for each object that :func:`is_held_by` is asked for and only frozen ones hold.
    """
    global _frozen  # noqa: PLW0603 - one for the process
    with collector_paused():
        gc.unfreeze()
        try:
            yield
        finally:
            found = frozenset(map(id, gc.get_objects()))
            gc.freeze()
            _frozen = gc.get_freeze_count(), found
