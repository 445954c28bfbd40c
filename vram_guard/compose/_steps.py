"""A second optimizer step like the first, where only one was traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vram_guard.compose._errors import CannotComposeError
from vram_guard.timeline import Marks, Phase, Timeline


def repeated(timeline: Timeline) -> Timeline:
    """The timeline with its one step run again, as far as its blocks are concerned: their forward and backward pass.

    The second step frees nothing of the set-up, and takes no workspace of a library that the first one has kept. What
    lies in host memory is that of the first one.
    """
    marks = timeline.marks
    if marks is None:
        raise CannotComposeError("a trace of one step has no marks")
    start = next((phase.start for phase in timeline.phases if phase.step == 1), len(timeline.events))
    freed = {~event for event in timeline.events if event < 0}
    kept = (block for block in timeline.events[start:] if block >= 0 and not _once(timeline, block, freed))
    again = {block: number for number, block in enumerate(kept, len(timeline.blocks))}
    events = list(timeline.events)
    at = list(range(start))
    for event in timeline.events[start:]:
        at.append(len(events))
        events += _renamed(event, again)
    at.append(len(events))
    second = tuple(
        Phase(phase.name, 2, at[phase.start], tier=phase.tier) for phase in timeline.phases if phase.step == 1
    )
    return replace(
        timeline,
        blocks=(*timeline.blocks, *(timeline.blocks[block] for block in again)),
        events=tuple(events),
        phases=(*timeline.phases, *second),
        marks=Marks(
            (*marks.borders, *(one._replace(at=at[one.at]) for one in marks.borders if one.at >= start)),
            *(
                (*places, *((at[place], again.get(block, block)) for place, block in places if place >= start))
                for places in (marks.accumulated, marks.used)
            ),
        ),
    )


def _once(timeline: Timeline, block: int, freed: set[int]) -> bool:
    return timeline.blocks[block].category == "workspace" and block not in freed


def _renamed(event: int, names: dict[int, int]) -> Iterator[int]:
    block = event if event >= 0 else ~event
    if block in names:
        yield names[block] if event >= 0 else ~names[block]
