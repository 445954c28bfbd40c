"""Pictures: the memory of a step over its events, stacked by category, with its peak and the budget.

matplotlib is imported when a picture is asked for, and only its Figure class is used: no window system is
needed, and the user's own pyplot state and backend stay as they are.
"""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.report.files import write_atomically
from vram_guard.report.walk import walk
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Category, Estimate, Phase, Timeline

#: Bottom to top, what stays longest first. Colours of Paul Tol's "muted" and "light" schemes, which
#: colour-blind eyes tell apart (Tol, "Colour Schemes", SRON technical note, 2021).
LAYERS: dict[Category, tuple[str, str]] = {
    "parameters": ("#332288", "parameters"),
    "buffers": ("#6f6fb8", "buffers"),
    "optimizer_states": ("#88ccee", "optimizer states"),
    "gradients": ("#44aa99", "gradients"),
    "batch": ("#ddcc77", "batch"),
    "activations": ("#ee8866", "activations"),
    "temporaries": ("#cc6677", "temporaries"),
    "workspace": ("#bbbbbb", "workspace"),
}
INK, FAINT, LIMIT = "#222222", "#f2f2f5", "#c0102a"

FORMATS = ("png", "svg", "pdf")

#: More columns than this cannot be told apart at the width of a page: each then shows its highest moment.
MOST_COLUMNS = 1600

#: A split step is traced with two micro-batches: the later ones repeat the second.
DRAWN_MICRO_BATCHES = 2

#: Room above the highest curve for the peak's label.
HEADROOM = 1.18

#: Phases narrower than this share of the width have no room for their name.
LEAST_LABELLED = 0.05


class Stack(NamedTuple):
    """Bytes by category over the events of a timeline."""

    events: list[int]
    """The event that each column shows, ascending."""
    layers: dict[Category, list[int]]
    reserved: list[int]


def timeline_figure(
    timeline: Timeline,
    batch_size: int,
    *,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
    title: str | None = None,
) -> Figure:
    """The memory timeline of a step at one batch size.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
    """
    figure = new_figure(height=4.8)
    axes = figure.add_subplot()
    _panel(axes, timeline, batch_size, budget, settings, title or f"{timeline.precision}, batch {batch_size}")
    _finish(figure, [axes], budget)
    return figure


def plan_figure(plan: Plan, *, settings: AllocatorSettings | None = None) -> Figure:
    """The step as written above the step as planned, on one scale; a single panel where nothing changes.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
        InvalidInputError: the plan carries no timelines.
    """
    if plan.timeline is None or plan.timeline_before is None:
        raise InvalidInputError("this plan carries no timelines to draw; plans made by vram_guard.plan() do")
    before = f"as written: {plan.precision_before}, batch {plan.batch_size_before}"
    if not plan.changed:
        return timeline_figure(
            plan.timeline, plan.micro_batch_size, budget=plan.budget, settings=settings, title=before
        )
    size = f"batch {plan.batch_size}"
    if plan.splits > 1:
        size = f"{plan.splits} micro-batches of {plan.micro_batch_size}"
        if plan.splits > DRAWN_MICRO_BATCHES:
            size += " (two are drawn)"
    figure = new_figure(height=8.2)
    upper, lower = figure.subplots(2, 1, sharey=True)
    _panel(upper, plan.timeline_before, plan.batch_size_before, plan.budget, settings, before)
    after = f"planned: {plan.precision}, {size}"
    _panel(lower, plan.timeline, plan.micro_batch_size, plan.budget, settings, after)
    _finish(figure, [upper, lower], plan.budget)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> bool:
    """Write a figure as PNG, SVG or PDF, by the name's ending; whole or not at all.

    Returns:
        Whether it was written; where it could not be, a warning says why.

    Raises:
        InvalidInputError: the name ends in something else.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=picture_format(path), dpi=150)
    return write_atomically(path, buffer.getvalue())


def picture_format(path: str | os.PathLike[str]) -> str:
    """The format that a file's name asks for; a name without an ending is a PNG.

    Raises:
        InvalidInputError: the name ends in something else than .png, .svg or .pdf.
    """
    ending = Path(path).suffix.lstrip(".").lower() or "png"
    if ending not in FORMATS:
        raise InvalidInputError(f"{path}: pictures are written as .png, .svg or .pdf")
    return ending


def stack(
    timeline: Timeline, batch_size: int, settings: AllocatorSettings | None = None, *, most: int = MOST_COLUMNS
) -> Stack:
    """Bytes by category after every event, thinned to ``most`` columns that keep the maxima."""
    walked = walk(timeline, batch_size, settings=settings)
    columns = _highest(walked.allocated, most)
    wanted = set(columns)
    now: dict[Category, int] = dict.fromkeys(LAYERS, 0)
    layers: dict[Category, list[int]] = {category: [] for category in LAYERS}
    for index, event in enumerate(walked.timeline.events):
        block = event if event >= 0 else ~event
        category = walked.timeline.blocks[block].category
        now[category] += walked.granted[block] if event >= 0 else -walked.granted[block]
        if index in wanted:
            for name, held in now.items():
                layers[name].append(held)
    return Stack(columns, layers, [walked.reserved[index] for index in columns])


def _highest(curve: list[int], most: int) -> list[int]:
    """The indices to draw: all, or the highest of each of ``most`` stretches."""
    if len(curve) <= most:
        return list(range(len(curve)))
    edges = [len(curve) * i // most for i in range(most + 1)]
    return [max(range(*edge), key=curve.__getitem__) for edge in pairwise(edges)]


def new_figure(height: float) -> Figure:
    """An empty figure of the reports' width, in inches.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError("pictures need matplotlib: pip install 'vram-guard[plot]'") from error
    return Figure(figsize=(11, height), layout="constrained", facecolor="white")


def _panel(
    axes: Axes,
    timeline: Timeline,
    batch_size: int,
    budget: Budget | None,
    settings: AllocatorSettings | None,
    title: str,
) -> None:
    """One timeline in one pair of axes; y in bytes."""
    exact = timeline.exact(batch_size)
    drawn = stack(exact, batch_size, settings)
    estimate = exact.at(batch_size, settings=settings)
    count = len(exact.events)
    used = [category for category in LAYERS if any(drawn.layers[category])] or [*LAYERS][:1]
    axes.stackplot(
        drawn.events,
        [drawn.layers[category] for category in used],
        labels=[LAYERS[category][1] for category in used],
        colors=[LAYERS[category][0] for category in used],
        step="post",
        linewidth=0,
        zorder=2,
    )
    axes.plot(
        drawn.events,
        drawn.reserved,
        drawstyle="steps-post",
        color=INK,
        linewidth=1.1,
        label="reserved",
        zorder=3,
    )
    _phases(axes, exact.phases, count)
    _mark_peak(axes, exact, estimate, batch_size, settings)
    axes.set_xlim(0, max(1, count - 1))
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
    fitting = "" if budget is None else f", budget {format_bytes(budget.usable)}"
    axes.set_title(
        f"peak reserved {format_bytes(estimate.peak_reserved)}{fitting}",
        loc="right",
        fontsize=10,
        color=INK,
        pad=26,
    )


def _phases(axes: Axes, phases: tuple[Phase, ...], count: int) -> None:
    """Alternating bands for the phases, named above the axes, and a line where an optimizer step begins."""
    above = axes.get_xaxis_transform()
    ends = [*(phase.start for phase in phases[1:]), count]
    for index, (phase, end) in enumerate(zip(phases, ends, strict=True)):
        if end <= phase.start:
            continue
        if index % 2:
            axes.axvspan(phase.start, end, color=FAINT, linewidth=0, zorder=0)
        if end - phase.start >= LEAST_LABELLED * count:
            name = phase.name if phase.step else "set-up"
            middle = (phase.start + end) / 2
            axes.text(middle, 1.012, name, transform=above, ha="center", va="bottom", fontsize=7.5, color="#555555")
    for step in sorted({phase.step for phase in phases if phase.step}):
        own = [i for i, phase in enumerate(phases) if phase.step == step]
        start, end = phases[own[0]].start, ends[own[-1]]
        axes.axvline(start, color="#999999", linewidth=0.8, zorder=1)
        axes.text(start, 1.055, f" step {step}", transform=above, ha="left", va="bottom", fontsize=8.5, color=INK)
        axes.plot([start, end], [1.055, 1.055], transform=above, color="#999999", linewidth=0.8, clip_on=False)


def _mark_peak(
    axes: Axes, timeline: Timeline, estimate: Estimate, batch_size: int, settings: AllocatorSettings | None
) -> None:
    """A dot at the allocated peak, and above it what was being allocated there."""
    event = timeline.replay(batch_size, settings=settings).peak_event
    to_the_left = event > len(timeline.events) / 2
    first = (f"peak {format_bytes(estimate.peak_allocated)}", estimate.peak_phase.name, estimate.peak_module)
    second = (estimate.peak_source, estimate.peak_operator)
    lines = [", ".join(part for part in line if part) for line in (first, second)]
    axes.plot(event, estimate.peak_allocated, "o", color="white", markeredgecolor=INK, markersize=6, zorder=6)
    axes.annotate(
        "\n".join(line for line in lines if line),
        (event, estimate.peak_allocated),
        xytext=(12 if to_the_left else -12, 10),
        textcoords="offset points",
        ha="right" if to_the_left else "left",
        va="bottom",
        fontsize=8,
        color=INK,
        zorder=7,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#bbbbbb", "alpha": 0.9},
    )


def _finish(figure: Figure, panels: list[Axes], budget: Budget | None) -> None:
    """What all panels share: the scale, the budget's line, the legend."""
    top = max(1, *(axes.dataLim.y1 for axes in panels))
    if budget is not None:
        top = max(top, budget.usable) if budget.usable < 3 * top else top
    for axes in panels:
        byte_axis(axes, top)
        axes.set_xlabel("allocations and frees, in order", fontsize=8.5, color="#555555")
        if budget is not None and budget.usable <= top:
            axes.axhline(budget.usable, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 3)), label="budget", zorder=5)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(5, len(handles)),
        frameon=False,
        fontsize=8.5,
    )


def byte_axis(axes: Axes, top: int) -> None:
    """Bytes upwards, from 0 to a little above ``top``, in the unit that suits; the reports' plain look."""
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if top >= u)
    axes.set_ylim(0, top * HEADROOM)
    axes.yaxis.set_major_locator(_ticks(unit))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value / unit:g}")
    axes.set_ylabel(name)
    axes.tick_params(labelsize=8.5, colors="#444444")
    axes.grid(axis="y", color="#e3e3e8", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _ticks(unit: int) -> Any:
    """Ticks at round numbers of the unit."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    class RoundIn(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return np.asarray(super().tick_values(vmin / unit, vmax / unit)) * unit

    return RoundIn(nbins=7, steps=[1, 2, 2.5, 5, 10])
