"""Another form of the optimizer in a timeline, composed from a trace of that form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._events import blocks_of_set_up, shifted
from vram_guard.timeline import Affine, Marks, Timeline


def with_optimizer_of(timeline: Timeline, other: Timeline, *, on_host: bool = False) -> Timeline:
    """The timeline with the optimizer phases of another one.

    What the phase frees of earlier ones it frees behind as much of its own as before, while both forms do the same
    (gradients are clipped and unscaled, the comparison of recomputations is read); else at its end.

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
    gone = set[int]()
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
        at_event += [len(events)] * len(span)
        events += _merged(timeline, span, gone, other, list(replacing[phase.start]))
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


def _merged(timeline: Timeline, span: Sequence[int], gone: set[int], other: Timeline, taken: list[int]) -> list[int]:
    """One optimizer phase: the events of the other form, and the frees of earlier blocks among them.

    Args:
        timeline: the whole step.
        span: its events in this phase.
        gone: its blocks that optimizer phases allocate.
        other: the step with the other form.
        taken: the other form's events in this phase.
    """

    def sizes(of: Timeline, events: Iterable[int]) -> Iterator[tuple[bool, Affine]]:
        return ((event >= 0, of.blocks[event if event >= 0 else ~event].size) for event in events)

    own = [event for event in span if event >= 0 or ~event in gone]
    pairs = zip(sizes(timeline, own), sizes(other, taken), strict=False)
    alike = sum(1 for _pair in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    freed: list[list[int]] = [[] for _place in range(len(taken) + 1)]
    done = 0
    for event in span:
        if event >= 0 or ~event in gone:
            done += 1
        else:
            freed[done if done <= alike else -1].append(event)
    merged = list(freed[0])
    for event, then in zip(shifted(taken, len(timeline.blocks)), freed[1:], strict=True):
        merged += [event, *then]
    return merged


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
