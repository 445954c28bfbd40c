"""A predicted timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

The format is the Chromium project's "Trace Event Format" (document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a
JSON object with ``traceEvents``; counters have ``ph: "C"`` and their series in ``args``, slices ``ph: "X"`` with
``ts`` and ``dur``, instants ``ph: "i"``, names ``ph: "M"``. Its time stamps are microseconds; a prediction has no
clock, so one allocation or free takes one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vram_guard.report._walk import stack
from vram_guard.report.files import write_atomically

if TYPE_CHECKING:
    import os

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.timeline import Phase, Timeline

#: More moments than this make the file slow to open; each then stands for the highest of its stretch.
MOST_MOMENTS = 20_000

PROCESS, PHASES, MODULES = 1, 1, 2


def trace_events(
    timeline: Timeline,
    batch_size: int,
    *,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
) -> dict[str, Any]:
    """The timeline at one batch size as trace events: bytes by category, reserved bytes, phases, modules, the peak.

    Args:
        timeline: what to replay.
        batch_size: samples per micro-batch.
        budget: drawn as a counter of its own.
        settings: the allocator's settings; None: PyTorch's defaults.
    """
    exact = timeline.exact(batch_size)
    drawn = stack(exact, batch_size, settings, most=MOST_MOMENTS)
    events = [_name("process_name", f"predicted memory, batch {batch_size}, {exact.precision}")]
    events += [_name("thread_name", "phases", PHASES), _name("thread_name", "modules", MODULES)]
    usable = None if budget is None else budget.for_tier(exact.tier, exact.network).usable
    for column, event in enumerate(drawn.events):
        held = {name: layer[column] for name, layer in drawn.layers.items()}
        events.append(_counter("allocated by category", event, held))
        device = {"reserved": drawn.reserved[column], **({} if usable is None else {"budget": usable})}
        events.append(_counter("device", event, device))
        if drawn.streams:
            on = {_stream(number): layer[column] for number, layer in enumerate(drawn.streams)}
            events.append(_counter("allocated by stream", event, on))
    events += _phases(exact)
    events += _modules(exact)
    events.append(_peak(exact, batch_size, settings))
    about = {"batch_size": batch_size, "unit": "bytes", "clock": "one allocation or free is one microsecond"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "vram_guard", **about}}


def save_trace(
    timeline: Timeline,
    batch_size: int,
    path: str | os.PathLike[str],
    *,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
) -> bool:
    """Write :func:`trace_events` to a JSON file.

    Returns:
        Whether it was written; where it could not be, a warning says why.
    """
    content = trace_events(timeline, batch_size, budget=budget, settings=settings)
    return write_atomically(path, json.dumps(content, separators=(",", ":")) + "\n")


def _name(kind: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _counter(name: str, time: int, series: dict[Any, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": time, "pid": PROCESS, "args": series}


def _stream(number: int) -> str:
    return f"stream {number}" if number else "default stream"


def _slice(name: str, kind: str, start: int, end: int, thread: int) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": end - start, "pid": PROCESS, "tid": thread}


def _phase(phase: Phase) -> str:
    name = f"{phase.name} ({phase.label})" if phase.label else phase.name
    return f"{name}, step {phase.step}" if phase.step else name


def _phases(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        _slice(_phase(phase), "phase", phase.start, end, PHASES) for phase, end in timeline.spans() if end > phase.start
    ]


def _modules(timeline: Timeline) -> list[dict[str, Any]]:
    """A slice for each stretch in which one module allocates; frees belong to the module that allocated last."""
    slices: list[dict[str, Any]] = []
    start, running = 0, ""
    for index, event in enumerate(timeline.events):
        module = timeline.blocks[event].module if event >= 0 else running
        if module != running:
            if running:
                slices.append(_slice(running, "module", start, index, MODULES))
            start, running = index, module
    if running:
        slices.append(_slice(running, "module", start, len(timeline.events), MODULES))
    return slices


def _peak(timeline: Timeline, batch_size: int, settings: AllocatorSettings | None) -> dict[str, Any]:
    found = timeline.replay(batch_size, settings=settings)
    estimate = timeline.at(batch_size, settings=settings)
    where = {"module": estimate.peak_module, "source": estimate.peak_source, "operator": estimate.peak_operator}
    return {
        "name": "peak",
        "ph": "i",
        "s": "g",
        "ts": found.peak_event,
        "pid": PROCESS,
        "tid": PHASES,
        "args": {"allocated": estimate.peak_allocated, "reserved": estimate.peak_reserved, **where},
    }
