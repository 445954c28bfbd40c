"""Streams of a trace: which one is current, what each has waited for, and when the CPU waited.

The caching allocator keeps a pool of segments for each stream. A tensor that another stream uses
(``Tensor.record_stream``) can be taken again once that stream has got past its free. When it has is a matter of time,
which a trace has none of: it may be at once, and it is certain where the CPU has waited for the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vram_guard.timeline import Deferred, Phase

#: What is surely over: stream -> number of events that preceded its last work that is.
Reached = dict[int, int]

#: Phases at whose beginning all streams are taken to have caught up: a step's results are waited for about then.
_CAUGHT_UP = ("batch", "optimizer")


class _Wait(NamedTuple):
    """The CPU has waited."""

    at: int
    """Events that precede it."""
    over: Reached | None
    """What is over; None: all."""


class Issued(NamedTuple):
    """A collective that a stream other than the default one has been given."""

    stream: int
    at: int
    """Events that precede it."""
    after: int
    """Entries of the step's work that it has to wait for; -1: not known."""
    waits: int
    """Waits of the default stream that precede it."""


class StreamLog:
    """The streams of one trace, numbered in the order in which they are met; 0 is the default stream."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now  # the number of events so far
        self.identity = object()
        """Tells the streams of one trace from those of another."""
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[int, int] = {}
        self._waited: dict[int, Reached] = {}
        self._waits: list[_Wait] = []
        self._users: dict[int, set[int]] = {}
        self.counted: Callable[[], int] = lambda: 0
        """Entries of the step's work so far."""
        self._counted_at: dict[int, int] = {}
        """Events -> entries of the work, where the default stream was waited for."""
        self._default_waits: list[tuple[int, Reached]] = []
        """Where the default stream has waited, in entries of the work, and for what."""
        self.selected: Any = None
        """The stream that the program has selected, as it gave it; None: the default one."""
        self.current = 0
        """Its number."""

    def number(self, stream: Hashable) -> int:
        """The number of a stream; 0 for the default one (None)."""
        return 0 if stream is None else self._numbers.setdefault(stream, len(self._numbers) + 1)

    def take(self, priority: int, count: int) -> int:
        """The place in a pool of ``count`` streams of this priority, which are handed out in turn."""
        made = self._made.get(priority, 0)
        self._made[priority] = made + 1
        return made % count

    def select(self, stream: Any) -> Any:
        """Make this stream the current one; the stream that was."""
        before, self.selected = self.selected, stream
        self.current = self.number(stream)
        return before

    # --- order ------------------------------------------------------------------------------------------------

    def reached(self, stream: int) -> Reached:
        """What is over when all is that this stream has been given so far."""
        now = self._now()
        if not stream:
            self._counted_at[now] = self.counted()
        return {**self._waited.get(stream, {}), stream: now}

    def wait(self, stream: int, over: Reached) -> None:
        """The stream goes on only when that is over."""
        if not stream:
            self._default_waits.append((self.counted(), over))
        known = self._waited.setdefault(stream, {})
        for other, position in over.items():
            known[other] = max(position, known.get(other, 0))

    def issued(self) -> Issued | None:
        """A collective is given to the current stream; None for the default one, which goes on when it is over."""
        stream = self.current
        if not stream:
            return None
        behind = self._waited.get(stream, {}).get(0)
        after = -1 if behind is None else self._counted_at.get(behind, -1)
        return Issued(stream, self._now(), after, len(self._default_waits))

    def needed(self, issued: Issued) -> int:
        """Entries of the step's work that precede the first one that waits for a collective; -1: none waits."""
        later = self._default_waits[issued.waits :]
        return next((place for place, over in later if over.get(issued.stream, -1) >= issued.at), -1)

    def cpu_waits(self, over: Reached | None) -> None:
        """The CPU goes on only when that is over; None: the whole device."""
        if self._users:  # before a block has a second stream, no wait matters
            self._waits.append(_Wait(self._now(), over))

    # --- blocks that other streams use ------------------------------------------------------------------------

    def uses(self, block: int, stream: int) -> None:
        """``Tensor.record_stream``: another stream than its own uses this block."""
        self._users.setdefault(block, set()).add(stream)

    def deferred(self, events: Sequence[int], phases: Sequence[Phase]) -> tuple[Deferred, ...]:
        """The frees of blocks that other streams use, each with the event before which it has surely happened."""
        if not self._users:
            return ()
        starts = [phase.start for phase in phases if phase.name in _CAUGHT_UP]
        made = []
        for index, event in enumerate(events):
            users = self._users.get(~event) if event < 0 else None
            if users is not None:
                until = min(self._ends(index, users, starts), default=len(events))
                if until > index + 1:
                    made.append(Deferred(index, until))
        return tuple(made)

    def _ends(self, free: int, users: Iterable[int], starts: Sequence[int]) -> Iterator[int]:
        yield from (start for start in starts if start > free)
        for wait in self._waits:
            if wait.at > free and (wait.over is None or all(wait.over.get(user, 0) > free for user in users)):
                yield wait.at
                return
