"""The picture of a batch-size curve: how far each card carries the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.report.batch_curve import COMMON_CARDS, BatchCurve, Limit, batch_curve, close_together
from vram_guard.report.plot import INK, LIMIT, byte_axis, new_figure
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.timeline import Timeline

CURVE = "#332288"


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
    axes = figure.add_subplot()
    axes.plot(curve.sizes, curve.peaks, color=CURVE, linewidth=1.8, zorder=3)
    top = max(*curve.peaks, *(limit.usable for limit in curve.limits))
    byte_axis(axes, top)
    axes.set_xlim(0, curve.sizes[-1] * 1.02)
    axes.set_xlabel("batch size", fontsize=8.5, color="#555555")
    axes.set_title(title or f"peak reserved, {timeline.precision}", loc="left", fontsize=11, fontweight="bold")
    _mark_limits(axes, curve)
    if at > 1:
        peak = curve.peaks[curve.sizes.index(at)]
        axes.plot(at, peak, "D", color="white", markeredgecolor=INK, markersize=6, zorder=5)
        axes.annotate(f"batch {at}: {format_bytes(peak)}", (at, peak), xytext=(9, -11), textcoords="offset points",
                      fontsize=8, color=INK, zorder=6)  # fmt: skip
    return figure


def _mark_limits(axes: Axes, curve: BatchCurve) -> None:
    """A dashed line for each budget, and a dot where the curve meets it; lines too close to tell share a label."""
    for limit in curve.limits:
        axes.axhline(limit.usable, color=LIMIT, linewidth=1.0, linestyle=(0, (5, 3)), zorder=2)
        if limit.peak is not None:
            axes.plot(limit.largest, limit.peak, "o", color=LIMIT, markersize=5, zorder=4)
    for group in close_together(curve.limits):
        # Away from the curve: small budgets meet it at the left, large ones at the right.
        to_the_right = group[-1].largest < 0.6 * curve.sizes[-1]
        axes.annotate(
            " | ".join(f"{limit.name}: {_batch(limit)}" for limit in group),
            (1.0 if to_the_right else 0.0, group[-1].usable),
            xycoords=("axes fraction", "data"),
            xytext=(-3 if to_the_right else 3, 2),
            textcoords="offset points",
            ha="right" if to_the_right else "left",
            fontsize=8,
            color=INK,
        )


def _batch(limit: Limit) -> str:
    if not limit.largest:
        return "not one sample"
    return f"batch {limit.largest}{' or more' if limit.open_ended else ''}"
