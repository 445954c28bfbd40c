"""Segments: a timeline cut where the forward and the backward pass enter and leave its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from vram_guard.timeline import Marks, Timeline


class Segment(NamedTuple):
    """Consecutive events that belong to one block, or to none."""

    unit: str
    """Name of the block's module; "" between blocks."""
    phase: int
    """Index of the phase."""
    number: int
    """How many segments of the same unit precede it in the phase."""
    start: int
    end: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What the same part of another trace has in common with this one."""
        return self.unit, self.phase, self.number


class Cut:
    """A timeline and its segments.

    Args:
        timeline: with marks.
        marks: of the timeline.
        units: modules that are blocks; one that lies within another belongs to that.
    """

    def __init__(self, timeline: Timeline, marks: Marks, units: Collection[str]) -> None:
        self.timeline = timeline
        self._units = frozenset(units)
        self._owners: dict[str, str] = {}
        self.segments = tuple(self._numbered(_borders_by_phase(timeline, marks)))
        self.accumulated = marks.accumulated
        self.allocated: dict[int, int] = {}
        """Block of the timeline -> index of the segment that allocates it."""
        self.freed: dict[int, int] = {}
        for index, segment in enumerate(self.segments):
            for event in timeline.events[segment.start : segment.end]:
                if event >= 0:
                    self.allocated[event] = index
                else:
                    self.freed[~event] = index

    @property
    def called_once(self) -> bool:
        """True if no block runs its forward twice in a phase."""
        phases = self.timeline.phases
        return not any(
            segment.unit and segment.number and phases[segment.phase].name == "forward" for segment in self.segments
        )

    def crossing(self, index: int) -> list[int]:
        """The blocks that a segment allocates and that live on in segments of other units, in order."""
        segment = self.segments[index]
        found = []
        for event in self.timeline.events[segment.start : segment.end]:
            if event >= 0:
                freed = self.freed.get(event)
                if not segment.unit or freed is None or self.segments[freed].unit != segment.unit:
                    found.append(event)
        return found

    def owner(self, path: str) -> str:
        """The outermost block that a module belongs to; "" where there is none."""
        owner = self._owners.get(path)
        if owner is None:
            inside = [part for part in _ancestors(path) if part in self._units]
            owner = self._owners[path] = min(inside, key=len, default="")
        return owner

    def _numbered(self, borders: list[list[tuple[int, str | None]]]) -> Iterator[Segment]:
        """The segments: every phase begins with one that belongs to no block."""
        ends = [*(phase.start for phase in self.timeline.phases[1:]), len(self.timeline.events)]
        for phase, end in enumerate(ends):
            seen: Counter[str] = Counter()
            if self.timeline.phases[phase].name == "backward":
                places = self._backward(self.timeline.phases[phase].start, end)
            else:
                places = [(self.timeline.phases[phase].start, ""), *self._forward(borders[phase])]
            stops = [*(at for at, _unit in places[1:]), end]
            for (at, unit), stop in zip(places, stops, strict=True):
                yield Segment(unit, phase, seen[unit], at, stop)
                seen[unit] += 1

    def _forward(self, borders: list[tuple[int, str | None]]) -> Iterator[tuple[int, str]]:
        """Where blocks are entered and left; ``borders`` have None where a module is left."""
        stack: list[str] = []
        for at, module in borders:
            before = stack[-1] if stack else ""
            if module is not None:
                stack.append(before or (module if module in self._units else ""))
            elif stack:
                stack.pop()
            now = stack[-1] if stack else ""
            if now != before:
                yield at, now

    def _backward(self, start: int, end: int) -> list[tuple[int, str]]:
        """A block's part of the backward pass begins just before the first allocation of its own."""
        places, current = [(start, "")], ""
        blocks = self.timeline.blocks
        for at, event in enumerate(self.timeline.events[start:end], start):
            if event >= 0 and (owner := self.owner(blocks[event].module)) != current:
                places.append((at, owner))
                current = owner
        return places


def _borders_by_phase(timeline: Timeline, marks: Marks) -> list[list[tuple[int, str | None]]]:
    """The borders of each phase. One between two phases belongs to the earlier if a module is left there."""
    starts = [phase.start for phase in timeline.phases]
    made: list[list[tuple[int, str | None]]] = [[] for _ in starts]
    phase = 0
    for border in marks.borders:
        while border.entered and phase + 1 < len(starts) and border.at >= starts[phase + 1]:
            phase += 1
        made[phase].append((border.at, border.module if border.entered else None))
    return made


def _ancestors(path: str) -> Iterator[str]:
    """The module itself and all that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
