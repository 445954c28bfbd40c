"""Segments: a timeline cut where the forward and the backward pass enter and leave its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from vram_guard.timeline import Border, Marks, Timeline


class BlockEvents(NamedTuple):
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


class Place(NamedTuple):
    """A place in a segment."""

    segment: int
    """Its index."""
    allocations: int
    """So many allocations of the segment precede it."""


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
        self._borders = _borders_by_phase(timeline, marks)
        self.segments = tuple(self._numbered())
        self.accumulated, self.used = marks.accumulated, marks.used
        self.freed: dict[int, Place] = {}
        """Block of the timeline -> where it is freed."""
        for index, segment in enumerate(self.segments):
            allocations = 0
            for event in timeline.events[segment.start : segment.end]:
                if event >= 0:
                    allocations += 1
                else:
                    self.freed[~event] = Place(index, allocations)
        starts = [segment.start for segment in self.segments]
        self._readers: dict[int, set[str]] = {}
        """Block of the timeline -> the units whose backward passes read it."""
        for at, block in marks.used:
            self._readers.setdefault(block, set()).add(self.segments[bisect_left(starts, at) - 1].unit)

    @property
    def called_once(self) -> bool:
        """True if no block runs its forward twice in a phase."""
        phases = self.timeline.phases
        return not any(
            segment.unit and segment.number and phases[segment.phase].name == "forward" for segment in self.segments
        )

    def crossing(self, index: int) -> list[int]:
        """The blocks that a segment allocates and that other units free or read in their backward pass, in order."""
        segment = self.segments[index]
        found = []
        for event in self.timeline.events[segment.start : segment.end]:
            if event >= 0:
                freed = self.freed.get(event)
                readers = self._readers.get(event, set()) - {segment.unit}
                if not segment.unit or freed is None or self.segments[freed.segment].unit != segment.unit or readers:
                    found.append(event)
        return found

    def owner(self, path: str) -> str:
        """The outermost block that a module belongs to; "" where there is none."""
        owner = self._owners.get(path)
        if owner is None:
            inside = [part for part in _ancestors(path) if part in self._units]
            owner = self._owners[path] = min(inside, key=len, default="")
        return owner

    def on_host(self) -> dict[int, str]:
        """Block of the host -> the block of the model whose forward put it there; others are not in it."""
        owners: dict[int, str] = {}
        for phase, borders in enumerate(self._borders):
            if self.timeline.phases[phase].name != "forward":
                continue
            changes = list(self._forward(borders))
            for (border, unit), (following, _unit) in pairwise(changes):
                inside = self.timeline.host_events[border.on_host : following.on_host]
                owners.update({event: unit for event in inside if unit and event >= 0})
        return owners

    def _numbered(self) -> Iterator[BlockEvents]:
        """The segments: every phase begins with one that belongs to no block."""
        for index, (phase, end) in enumerate(self.timeline.spans()):
            seen: Counter[str] = Counter()
            places = [(phase.start, "")]
            if phase.name == "backward":
                places += self._backward(phase.start, end)
            else:
                places += [(border.at, unit) for border, unit in self._forward(self._borders[index])]
            stops = [*(at for at, _unit in places[1:]), end]
            for (at, unit), stop in zip(places, stops, strict=True):
                yield BlockEvents(unit, index, seen[unit], at, stop)
                seen[unit] += 1

    def _forward(self, borders: list[Border]) -> Iterator[tuple[Border, str]]:
        """Where blocks are entered and left, and which block runs from there on."""
        stack: list[str] = []
        for border in borders:
            before = stack[-1] if stack else ""
            if border.entered:
                stack.append(before or (border.module if border.module in self._units else ""))
            elif stack:
                stack.pop()
            now = stack[-1] if stack else ""
            if now != before:
                yield border, now

    def _backward(self, start: int, end: int) -> Iterator[tuple[int, str]]:
        """A block's part of the backward pass begins just before the first allocation of its own."""
        blocks, current = self.timeline.blocks, ""
        for at, event in enumerate(self.timeline.events[start:end], start):
            if event >= 0 and (owner := self.owner(blocks[event].module)) != current:
                yield at, owner
                current = owner


def _borders_by_phase(timeline: Timeline, marks: Marks) -> list[list[Border]]:
    """The borders of each phase. One between two phases belongs to the earlier if a module is left there."""
    starts = [phase.start for phase in timeline.phases]
    made: list[list[Border]] = [[] for _ in starts]
    phase = 0
    for border in marks.borders:
        while border.entered and phase + 1 < len(starts) and border.at >= starts[phase + 1]:
            phase += 1
        made[phase].append(border)
    return made


def _ancestors(path: str) -> Iterator[str]:
    """The module itself and all that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
