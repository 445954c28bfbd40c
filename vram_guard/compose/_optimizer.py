"""Another form of the optimizer in a timeline, composed from a trace of that form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._events import blocks_of_set_up, shifted
from vram_guard.timeline import Marks, Timeline


def with_optimizer_of(timeline: Timeline, other: Timeline, *, on_host: bool = False) -> Timeline:
    """The timeline with the optimizer phases of another one.

    What the phase frees of earlier ones (gradients) it frees before or after all that the other form allocates, as it
    does before or after its own first allocation.

    Args:
        timeline: the whole step.
        other: a step with the same weights; nothing but its optimizer phases counts.
        on_host: what it holds in host memory counts too: its optimizer is there.

    Raises:
        CannotComposeError: the two have not the same optimizer phases or gradients; or with ``on_host``, in the step
            states are made before it begins, or both traces free host memory.
    """
    taken = list(_optimizer_phases(other))
    own = list(_optimizer_phases(timeline))
    if [key for key, _start, _end in taken] != [key for key, _start, _end in own]:
        raise CannotComposeError("the traces have other optimizer phases")
    if _gradients(timeline) != _gradients(other):
        raise CannotComposeError("the traces have other gradients")
    if on_host and any(timeline.blocks[block].category == "optimizer_states" for block in blocks_of_set_up(timeline)):
        raise CannotComposeError("states are made before the first step")
    replacing = {start: _own_events(other, *span) for (_key, start, _end), (_, *span) in zip(own, taken, strict=True)}
    offset, gone = len(timeline.blocks), set[int]()
    events: list[int] = []
    at_event: list[int] = []
    phases = []
    for phase, end in timeline.spans():
        phases.append(phase._replace(start=len(events)))
        span = timeline.events[phase.start : end]
        if phase.name != "optimizer":
            for event in span:
                at_event.append(len(events))
                if event >= 0 or ~event not in gone:
                    events.append(event)
            continue
        gone.update(event for event in span if event >= 0)
        first = next((at for at, event in enumerate(span) if event >= 0), len(span))
        early, late = ([e for e in part if e < 0 and ~e not in gone] for part in (span[:first], span[first:]))
        at_event += [len(events)] * len(span)
        events += early
        events += shifted(replacing[phase.start], offset)
        events += late
    at_event.append(len(events))
    marks = timeline.marks
    return replace(
        timeline,
        blocks=(*timeline.blocks, *other.blocks),
        events=tuple(events),
        phases=tuple(phases),
        **(_in_host_memory(timeline, other) if on_host else {}),
        marks=None if marks is None else Marks((), tuple((at_event[at], block) for at, block in marks.accumulated)),
    )


def _in_host_memory(timeline: Timeline, other: Timeline) -> dict[str, Any]:
    """What both put there. One of them frees nothing, so that its place among the events of the other is no matter."""
    staying, moving = sorted((timeline, other), key=lambda one: any(event < 0 for event in one.host_events))
    if any(event < 0 for event in staying.host_events):
        raise CannotComposeError("both traces free host memory")
    return {
        "host_blocks": (*staying.host_blocks, *moving.host_blocks),
        "host_events": (*staying.host_events, *shifted(moving.host_events, len(staying.host_blocks))),
    }


def _gradients(timeline: Timeline) -> list[int]:
    """The sizes of all gradients: weights that the step does not use have none."""
    accumulated = () if timeline.marks is None else timeline.marks.accumulated
    return sorted(timeline.blocks[block].size.base for block in {block for _at, block in accumulated})


def _optimizer_phases(timeline: Timeline) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Each phase of the optimizer: (its step, its number in the step), start and end."""
    seen: dict[int, int] = {}
    for phase, end in timeline.spans():
        if phase.name == "optimizer":
            seen[phase.step] = seen.get(phase.step, -1) + 1
            yield (phase.step, seen[phase.step]), phase.start, end


def _own_events(timeline: Timeline, start: int, end: int) -> Iterator[int]:
    """The events of blocks that optimizer phases allocate, in one of these."""
    own = {
        event
        for _key, first, last in _optimizer_phases(timeline)
        for event in timeline.events[first:last]
        if event >= 0
    }
    return (event for event in timeline.events[start:end] if (event if event >= 0 else ~event) in own)
