"""Frozen modules that wait on the host, composed from a trace in which they stay on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._events import shifted
from vram_guard.timeline import Border, HostBlock, Marks, Timeline


def with_frozen_on_host(timeline: Timeline, modules: Mapping[str, Sequence[int]]) -> Timeline:
    """The timeline in which modules' parameters lie on the host and come to the GPU for each of their forwards.

    Their copies are made in the order of the parameters as a forward begins, and freed in that order as it ends, as
    :func:`vram_guard.techniques.frozen.keep_on_host` does.

    Args:
        timeline: in which all parameters stay on the GPU, with marks.
        modules: name of each module that waits -> the timeline's blocks that are its parameters, in their order.

    Returns:
        The timeline, with marks. It has no work and no collectives.

    Raises:
        CannotComposeError: a part of such a module runs outside its forward, or its forward within itself; or the
            timeline has no marks, or frees that wait for other streams.
    """
    marks = timeline.marks
    if marks is None or timeline.deferred:
        raise CannotComposeError("a trace has no marks, or frees wait for other streams")
    waiting = [block for blocks in modules.values() for block in blocks]
    gone = frozenset(waiting)
    if not gone.isdisjoint(~event for event in timeline.events if event < 0):
        raise CannotComposeError("a parameter is freed")
    blocks = list(timeline.blocks)
    events: list[int] = []
    at_event: list[int] = []
    begun: dict[int, int] = {}
    borders: list[Border] = []
    copies = range(0)

    def go_on(until: int) -> None:
        for event in timeline.events[len(at_event) : until]:
            at_event.append(len(events))
            if event not in gone:
                events.append(event)

    for border, name in _forwards(marks.borders, modules):
        go_on(border.at)
        if name and not border.entered:
            events += (~copy for copy in copies)
        borders.append(border._replace(at=len(events), on_host=border.on_host + len(waiting)))
        if name and border.entered:
            begun.setdefault(border.at, len(events))
            copies = range(len(blocks), len(blocks) + len(modules[name]))
            blocks += (timeline.blocks[block]._replace(module=name) for block in modules[name])
            events += copies
    go_on(len(timeline.events))
    at_event.append(len(events))
    # A phase that begins with a forward begins with its copies.
    starts = (begun.get(phase.start, at_event[phase.start]) for phase in timeline.phases)
    return replace(
        timeline,
        blocks=tuple(blocks),
        events=tuple(events),
        phases=tuple(phase._replace(start=start) for phase, start in zip(timeline.phases, starts, strict=True)),
        host_blocks=(*(HostBlock(timeline.blocks[one].size, pinned=False) for one in waiting), *timeline.host_blocks),
        host_events=(*range(len(waiting)), *shifted(timeline.host_events, len(waiting))),
        work=(),
        collectives=(),
        marks=Marks(
            tuple(borders),
            tuple((at_event[at], block) for at, block in marks.accumulated),
            tuple((at_event[at], block) for at, block in marks.used),
        ),
    )


def _forwards(borders: Sequence[Border], modules: Mapping[str, object]) -> Iterator[tuple[Border, str]]:
    """Each border, with the name of the module that waits where its forward begins or ends."""
    running = ""
    for border in borders:
        if border.module in modules:
            if border.entered == bool(running):
                raise CannotComposeError("a forward runs within itself")
            running = border.module if border.entered else ""
            yield border, border.module
            continue
        outer = next((name for name in modules if border.module.startswith(f"{name}.")), "")
        if outer and outer != running:
            raise CannotComposeError("a part of a frozen module runs outside its forward")
        yield border, ""
