"""Python's collector of cycles."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

from vram_guard.forks.exclusive import in_copy


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


class ObjectsBefore:
    """The objects that were there when this was made, told from newer ones by where the collector keeps them.

    An object's number does not tell: it goes to another object when the first one dies. All that is there is moved out
    of the collector's youngest generation; while the collector is paused, what is found there later is new.

    In a copy of a process everything that is there is frozen. Elsewhere nothing is frozen afterwards, also what was.

    The collector does not know values that hold no others, and a dictionary not before it holds some: whether those
    were there is told by what refers to them.

    Example:
        >>> with collector_paused():
        ...     old, held = [], [{"calls": 0}]
        ...     before = ObjectsBefore()
        ...     new = []
        ...     old in before, new in before, before.referred_to([held[0], {"calls": 0}]) == {id(held[0])}
        (True, False, True)
    """

    def __init__(self) -> None:
        self._witness: list[object] = []
        """One of them: where it is found among the new ones, nothing can be told."""
        self._new: set[int] = set()
        """Numbers of new objects, which are never those of older ones."""
        self._asked_for: dict[int, Callable[[], object]] = {}
        self._in_copy = in_copy()
        gc.freeze()
        if not self._in_copy:
            gc.unfreeze()

    def __contains__(self, value: object) -> bool:
        """Of what the collector knows, see :meth:`is_told`."""
        if id(value) in self._new:
            return False
        asked_for = self._asked_for.get(id(value))
        if asked_for is not None and asked_for() is value:
            return True
        self._list()
        if id(value) in self._new:
            return False
        try:
            self._asked_for[id(value)] = weakref.ref(value)
        except TypeError:
            self._asked_for[id(value)] = lambda: value
        return True

    @staticmethod
    def is_told(value: object) -> bool:
        """True if where the collector keeps a value tells whether it is one of them."""
        return gc.is_tracked(value) and type(value) is not dict

    def referred_to(self, values: list[object]) -> set[int]:
        """The numbers of those of these values that one of the objects refers to, frames left alone."""
        if not values:
            return set()
        with collector_paused():
            self._list()
            if self._in_copy:
                gc.unfreeze()
            holders = gc.get_referrers(*values)
            if self._in_copy:
                gc.freeze()
            held = [one for one in holders if not isinstance(one, FrameType) and one in self]
            return {id(one) for one in gc.get_referents(*held)} & set(map(id, values))

    def _list(self) -> None:
        new = set(map(id, gc.get_objects() if self._in_copy else gc.get_objects(0)))
        if id(self._witness) not in new:
            self._new |= new
