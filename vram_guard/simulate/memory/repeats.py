"""Rounds that stand for many: what one of them leaves behind is counted for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vram_guard.limits import EVENTS_WRITTEN
from vram_guard.timeline import Timeline


class Repeat(NamedTuple):
    """A traced round, and how many rounds like it precede it."""

    start: int
    """Events before it."""
    end: int
    """Events until its end."""
    others: int
    """Rounds that are not traced; they come right before it."""
    left: tuple[int, ...]
    """The blocks that each round leaves behind, of the traced one."""
    kept: int = 0
    """Bytes that all rounds leave behind, and of what is joined to them in the last one."""


def paired(made: Iterable[int], gone: Iterable[int], kinds: Sequence[object]) -> list[tuple[int, int | None]]:
    """Blocks that a round has made and left behind, each with the one that it stands in place of, if any.

    A name that is assigned again in each round drops what the round before it had made at the same line: no growth,
    but for the bytes by which the new one is larger.

    Args:
        made: blocks of the round that are there at its end.
        gone: blocks that were there at its beginning, and are not at its end.
        kinds: of every block: what tells the line and the operator that made it.
    """
    dropped: dict[object, list[int]] = {}
    for block in sorted(gone, reverse=True):
        dropped.setdefault(kinds[block], []).append(block)
    return [(block, dropped[kinds[block]].pop() if dropped.get(kinds[block]) else None) for block in sorted(made)]


def expanded(timeline: Timeline, repeats: Sequence[Repeat]) -> Timeline:
    """The timeline with what all rounds leave behind."""
    if not any(repeat.others and repeat.left for repeat in repeats):
        return timeline
    blocks = list(timeline.blocks)
    inserted: dict[int, list[int]] = {}
    twins: dict[int, list[int]] = {}
    for repeat in repeats:
        round_events = _round(timeline.events[repeat.start : repeat.end], repeat)
        added = inserted.setdefault(repeat.start, [])
        for _other in range(repeat.others if repeat.left else 0):
            new: dict[int, int] = {}
            for event in round_events:
                if event < 0:
                    added.append(~new[~event])
                    continue
                new[event] = len(blocks)
                added.append(len(blocks))
                blocks.append(timeline.blocks[event])
            for block in repeat.left:
                twins.setdefault(block, []).append(new[block])
    events: list[int] = []
    begins: list[int] = []  # where each event's place begins, what is inserted before it included
    places: list[int] = []
    for index, event in enumerate(timeline.events):
        begins.append(len(events))
        events += inserted.get(index, ())
        places.append(len(events))
        events.append(event)
        if event < 0:
            events += (~twin for twin in reversed(twins.get(~event, ())))
    begins.append(len(events))
    return replace(
        timeline,
        blocks=tuple(blocks),
        events=tuple(events),
        phases=tuple(phase._replace(start=begins[phase.start]) for phase in timeline.phases),
        deferred=tuple(one._replace(free=places[one.free], until=begins[one.until]) for one in timeline.deferred),
    )


def _round(events: Sequence[int], repeat: Repeat) -> list[int]:
    """The events of a round that is not traced: what it leaves behind, and its temporaries where they are few."""
    left = set(repeat.left)
    kept = left
    if len(events) * repeat.others <= EVENTS_WRITTEN:
        kept = left | ({event for event in events if event >= 0} & {~event for event in events if event < 0})
    return [event for event in events if (event in kept if event >= 0 else ~event in kept and ~event not in left)]
