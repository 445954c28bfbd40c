"""A second optimizer step like the first, where only one was traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vram_guard.compose._errors import CannotComposeError
from vram_guard.timeline import Marks, Phase, Timeline


def repeated(timeline: Timeline) -> Timeline:
    """The timeline with its one step run again, as if its optimizer took nothing on the GPU.

    The second step takes no workspace of a library that the first one has kept, and puts nothing into host memory that
    the first one has left there. The first step's batch goes where the next one comes, its loss once there is another.
    """
    marks = timeline.marks
    if marks is None:
        raise CannotComposeError("a trace of one step has no marks")
    start = next((phase.start for phase in timeline.phases if phase.step == 1), len(timeline.events))
    freed = {~event for event in timeline.events if event < 0}
    kept = [block for block in timeline.events[start:] if block >= 0 and not _once(timeline, block, freed)]
    again = {block: number for number, block in enumerate(kept, len(timeline.blocks))}
    batch, loss = _replaced(timeline, again.keys() - freed)
    events = list(timeline.events)
    at = list(range(start))
    for place, event in enumerate(timeline.events[start:], start):
        events += loss.get(place, ())
        at.append(len(events))
        events += (*batch.get(place, ()), *_renamed(event, again))
    at.append(len(events))
    second = tuple(
        Phase(phase.name, 2, at[phase.start], tier=phase.tier) for phase in timeline.phases if phase.step == 1
    )
    on_host = next((border.on_host for border in marks.borders if border.at >= start), len(timeline.host_events))
    moved = {~event for event in timeline.host_events if event < 0}.intersection(timeline.host_events[on_host:])
    moved_again = {block: number for number, block in enumerate(sorted(moved), len(timeline.host_blocks))}
    moves = (each for event in timeline.host_events[on_host:] for each in _renamed(event, moved_again))
    return replace(
        timeline,
        blocks=(*timeline.blocks, *(timeline.blocks[block] for block in again)),
        events=tuple(events),
        phases=(*timeline.phases, *second),
        host_blocks=(*timeline.host_blocks, *(timeline.host_blocks[block] for block in moved_again)),
        host_events=(*timeline.host_events, *moves),
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


def _replaced(timeline: Timeline, left: set[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Where the second step frees what the first one has left of its batches, and of its forward passes."""
    found: dict[str, list[int]] = {"batch": [], "forward": []}
    places: dict[str, int] = {}
    for phase, end in timeline.spans():
        if phase.step == 1 and phase.name in found:
            found[phase.name] += (~event for event in timeline.events[phase.start : end] if event in left)
            places.setdefault(phase.name, phase.start if phase.name == "batch" else end)
    one, other = ({places.get(name, -1): frees} for name, frees in found.items())
    return one, other


def _renamed(event: int, names: dict[int, int]) -> Iterator[int]:
    block = event if event >= 0 else ~event
    if block in names:
        yield names[block] if event >= 0 else ~names[block]
