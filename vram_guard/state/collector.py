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
        self._frozen = in_copy()
        gc.freeze()
        if not self._frozen:
            gc.unfreeze()

    def __contains__(self, value: object) -> bool:
        """Of what the collector knows, and of dictionaries that it has known from the beginning."""
        if id(value) in self._new:
            return False
        asked_for = self._asked_for.get(id(value))
        if asked_for is not None and asked_for() is value:
            return True
        self._list()
        if id(value) in self._new:
            return False
        with contextlib.suppress(TypeError):  # of a list: it is not kept alive, a trace lets go of it as the step does
            self._asked_for[id(value)] = weakref.ref(value)
        return True

    def alive(self, numbers: set[int]) -> list[object]:
        """The dictionaries that have these numbers and are new to the collector."""
        return [one for one in self._listed() if id(one) in numbers and type(one) is dict] if numbers else []

    def referred_to(self, values: list[object]) -> set[int]:
        """The numbers of those of these values that one of the objects refers to, frames left alone."""
        if not values:
            return set()
        numbers = set(map(id, values))
        with collector_paused():
            self._list()
            if self._frozen:
                self._frozen = False
                gc.unfreeze()
                weakref.finalize(self, gc.freeze)
            found = gc.get_referents(*(one for one in gc.get_referrers(*values) if self._is_old(one)))
            if any(not (gc.is_tracked(one) or type(one) is dict) for one in values):
                found += self._in_plain_containers()
        return numbers & set(map(id, found))

    def _in_plain_containers(self) -> list[object]:
        """What dictionaries and tuples hold that the collector does not know, as they hold nothing that it knows."""
        found, seen = list[object](), set[int]()
        parts = gc.get_referents(*filter(self._is_old, gc.get_objects()))
        while parts:
            plain = {id(one): one for one in parts if type(one) in (dict, tuple) and not gc.is_tracked(one)}
            parts = gc.get_referents(*(one for number, one in plain.items() if number not in seen))
            seen |= plain.keys()
            found += parts
        return found

    def _is_old(self, holder: object) -> bool:
        return id(holder) not in self._new and type(holder) is not FrameType

    def _list(self) -> None:
        new = set(map(id, self._listed()))
        if id(self._witness) not in new:
            self._new |= new

    def _listed(self) -> list[object]:
        return gc.get_objects() if self._frozen else gc.get_objects(0)
