"""Pictures by matplotlib: the memory of a step over its events, the peak over the batch size, plans for budgets.

matplotlib is imported when a picture is asked for, and only its Figure class is used: no window system is
needed, and the user's own pyplot state and backend stay as they are. The words are English: matplotlib's own fonts
have no Chinese signs.
"""

from __future__ import annotations

import io
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import ENGLISH, _, speaking
from vram_guard.printable import printable
from vram_guard.report._charts import Chart, batch_chart, timeline_charts
from vram_guard.report.batch_curve import COMMON_CARDS, batch_curve
from vram_guard.report.categories import category_name
from vram_guard.report.files import write_atomically

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.plan import Plan
    from vram_guard.plan.per_budget import PlanOfBudget
    from vram_guard.timeline import Category, Timeline

#: Of Paul Tol's "muted" and "light" schemes, which colour-blind eyes tell apart (Tol, "Colour Schemes", SRON
#: technical note, 2021); the page's are in assets/report.css.
COLOURS: dict[Category, str] = {
    "parameters": "#332288",
    "buffers": "#6f6fb8",
    "optimizer_states": "#88ccee",
    "gradients": "#44aa99",
    "batch": "#ddcc77",
    "activations": "#ee8866",
    "temporaries": "#cc6677",
    "workspace": "#bbbbbb",
}
INK, SOFT, FRAME, FAINT, GRID = "#222222", "#555555", "#999999", "#f2f2f5", "#e3e3e8"
LIMIT, CURVE = "#c0102a", "#332288"

FORMATS = ("png", "svg", "pdf")

_GIB = 2**30

#: Inches of a bar, and of what stands above and below all of them.
_BAR, _TITLE = 0.42, 0.9

#: Signs of a plan beside its bar: no more stand in the picture's width.
_MOST_WORDS = 130

#: More columns than this cannot be told apart at the width of a page.
MOST_COLUMNS = 1600


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
    with speaking(ENGLISH):
        estimate = timeline.at(batch_size, settings=settings)
        _draw(figure, timeline_charts(estimate, timeline, budget, settings, MOST_COLUMNS), title)
    return figure


def plan_figure(plan: Plan, *, settings: AllocatorSettings | None = None) -> Figure:
    """The step as written above the step as planned, on one scale; a single panel where nothing changes.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
        InvalidInputError: the plan carries no timelines.
    """
    figure = new_figure(height=8.2 if plan.changed else 4.8)
    with speaking(ENGLISH):
        _draw(figure, timeline_charts(plan, plan.timeline, plan.budget, settings, MOST_COLUMNS))
    return figure


def batch_figure(
    timeline: Timeline,
    budgets: Iterable[Budget | GPU | str | int] = COMMON_CARDS,
    *,
    at: int = 1,
    settings: AllocatorSettings | None = None,
    title: str | None = None,
) -> Figure:
    """Peak reserved memory over the batch size, a line for each card, and its largest batch marked.

    Args:
        timeline: of the step.
        budgets: cards by name, budgets or amounts; by default common cards from 8 to 80 GB.
        at: the user's own batch size, marked too where it is above 1.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: None: the precision.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
        InvalidInputError: no budgets, or one that is none.
    """
    figure = new_figure(height=5.2)
    curve = batch_curve(timeline, budgets, at=at, settings=settings)
    with speaking(ENGLISH):
        _draw(figure, [batch_chart(curve, timeline.precision, at=at)], title)
    return figure


def budget_figure(
    plans: Sequence[PlanOfBudget],
    *,
    settings: AllocatorSettings | None = None,
    title: str | None = None,
) -> Figure:
    """The batch-size curve of the step as written, above the plan for each budget.

    Args:
        plans: of :func:`vram_guard.plan.per_budget.plans_per_budget`.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: None: the precision.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
        InvalidInputError: no plans, or one without its timeline.
    """
    timeline = plans[0].plan.timeline_before if plans else None
    if timeline is None:
        raise InvalidInputError(_("a batch-size curve needs at least one GPU or budget"))
    figure = new_figure(height=5.2 + _TITLE + _BAR * len(plans))
    before = plans[0].plan
    size = before.batch_size_before
    curve = batch_curve(timeline, [one.name for one in plans], at=size, settings=settings)
    with speaking(ENGLISH):
        heights = [5.2, _TITLE + _BAR * len(plans)]
        grid = figure.add_gridspec(2, 1, height_ratios=heights)
        above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        _draw(above, [batch_chart(curve, before.precision_before, at=size)], title)
        _plans(below.add_subplot(), plans)
    return figure


def _plans(axes: Axes, plans: Sequence[PlanOfBudget]) -> None:
    """A bar for each budget, filled as far as the plan reaches, with the plan in words."""
    names = [printable(one.name) for one in plans]
    usable = [one.plan.budget.usable / _GIB for one in plans]
    peaks = [one.plan.peak / _GIB if one.plan.fits else 0.0 for one in plans]
    axes.barh(names, usable, color=FAINT, edgecolor=LIMIT, linewidth=0.8, height=0.72)
    axes.barh(names, peaks, color=COLOURS["optimizer_states"], height=0.72)
    for number, one in enumerate(plans):
        axes.text(
            0, number, f" {shorten(one.words, _MOST_WORDS)}", va="center", fontsize=8, color=INK, parse_math=False
        )
    axes.set_xlim(0, max(usable))
    axes.set_xlabel(_("GiB: what may be reserved, and what the plan reserves"), fontsize=8.5, color=SOFT)
    remark = _("batch {count}; step times modelled", count=plans[0].plan.batch_size_before)
    axes.set_title(_("plan for each budget"), loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_title(remark, loc="right", fontsize=10, color=INK)
    axes.tick_params(labelsize=8.5, colors="#444444")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


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
        raise InvalidInputError(_("{path}: plots are written as .png, .svg or .pdf", path=path))
    return ending


def new_figure(height: float) -> Figure:
    """An empty figure of the reports' width, in inches.

    Raises:
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(_("plots need matplotlib: pip install matplotlib")) from error
    return Figure(figsize=(11, height), layout="constrained", facecolor="white")


def _draw(figure: Figure | SubFigure, charts: Sequence[Chart], title: str | None = None) -> None:
    """The charts below each other, with one legend."""
    panels = [figure.add_subplot(len(charts), 1, number) for number in range(1, len(charts) + 1)]
    for axes, chart in zip(panels, charts, strict=True):
        _scales(axes, chart)
        _curves(axes, chart)
        _spans(axes, chart)
        _marks(axes, chart)
        above = 26 if chart.is_timeline else 6
        # Names may hold dollar signs, which are no formulas.
        plain: dict[str, Any] = {"parse_math": False, "color": INK, "pad": above}
        axes.set_title(printable(title or chart.caption), loc="left", fontsize=11, fontweight="bold", **plain)
        axes.set_title(chart.remark, loc="right", fontsize=10, **plain)
    if not charts[0].is_timeline:  # whose lines are labelled
        return
    shown = [entry for axes in panels for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in shown}
    columns = min(5, len(handles))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5
    )


def _scales(axes: Axes, chart: Chart) -> None:
    """Bytes upwards in the unit that suits; the reports' plain look."""
    unit, name = chart.byte_unit
    axes.set_xlim(0, chart.last)
    axes.set_ylim(0, chart.top)
    axes.set_xticks(chart.x_ticks())
    axes.set_yticks([value * unit for value in chart.y_ticks()], [f"{value:g}" for value in chart.y_ticks()])
    axes.set_xlabel(chart.x_label, fontsize=8.5, color=SOFT)
    axes.set_ylabel(name)
    axes.tick_params(labelsize=8.5, colors="#444444")
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _curves(axes: Axes, chart: Chart) -> None:
    if chart.layers:
        axes.stackplot(
            chart.xs,
            list(chart.layers.values()),
            labels=[category_name(name) for name in chart.layers],
            colors=[COLOURS[name] for name in chart.layers],
            step="post",
            linewidth=0,
            zorder=2,
        )
    if chart.is_timeline:
        axes.plot(
            chart.xs,
            chart.curve,
            drawstyle="steps-post",
            color=INK,
            linewidth=1.1,
            label=_("reserved"),
            zorder=3,
        )
    else:
        axes.plot(chart.xs, chart.curve, color=CURVE, linewidth=1.8, zorder=3)


def _spans(axes: Axes, chart: Chart) -> None:
    """Bands for the phases, named above the axes, and a line where an optimizer step begins."""
    above = axes.get_xaxis_transform()
    for phase in chart.phases:
        if phase.shaded:
            axes.axvspan(phase.start, phase.end, color=FAINT, linewidth=0, zorder=0)
        middle = (phase.start + phase.end) / 2
        axes.text(middle, 1.012, phase.name, transform=above, ha="center", va="bottom", fontsize=7.5, color=SOFT)
    for step in chart.steps:
        axes.axvline(step.start, color=FRAME, linewidth=0.8, zorder=1)
        axes.text(step.start, 1.055, f" {step.name}", transform=above, va="bottom", fontsize=8.5, color=INK)
        ends = [step.start, min(step.end, chart.last)]
        axes.plot(ends, [1.055, 1.055], transform=above, color=FRAME, linewidth=0.8, clip_on=False)


def _marks(axes: Axes, chart: Chart) -> None:
    """Budgets, dots, and their labels."""
    for limit in chart.limits:
        axes.axhline(limit, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label=_("budget"), zorder=4)
    for dot in chart.dots:
        face, edge = (LIMIT, LIMIT) if dot.is_limit else ("white", INK)
        axes.plot(dot.x, dot.y, "o", color=face, markeredgecolor=edge, markersize=6, zorder=5, clip_on=False)
    for label in chart.labels:
        axes.annotate(
            "\n".join(label.lines),
            (label.x, label.y),
            xytext=(-9 if label.ends_there else 9, 4 if label.above else -4),
            textcoords="offset points",
            ha="right" if label.ends_there else "left",
            va="bottom" if label.above else "top",
            fontsize=8,
            color=INK,
            zorder=6,
            parse_math=False,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )
