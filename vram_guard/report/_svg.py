"""Charts as SVG text, for a page that brings its own colours: every element has a class, none a colour.

Nothing but the standard library is needed. Coordinates are written with one decimal, a tenth of a pixel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.language import _
from vram_guard.report._markup import escape
from vram_guard.report.categories import category_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vram_guard.report._charts import Chart

WIDTH, HEIGHT = 960.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 46.0, 36.0

#: As many as pixels across the page: finer ones cannot be told apart.
COLUMNS = 900

#: Pixels from one line of a label to the next.
LINE_HEIGHT = 13


class _Scale(NamedTuple):
    """From events and bytes to pixels."""

    last: int
    top: int

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(1, self.last)

    def y(self, size: float) -> float:
        """Pixels from above."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / max(1, self.top)


def svg(chart: Chart) -> str:
    """The chart as an SVG element; it can have the focus, and has a cursor for the page's script."""
    size = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    head = f'<svg viewBox="{size}" role="img" aria-label="{escape(chart.description)}" tabindex="0">'
    return head + "".join(elements(chart)) + "</svg>"


def script_data(chart: Chart) -> dict[str, Any]:
    """The values that the page's script reads off a chart of a step."""
    return {
        "events": chart.xs,
        "last": chart.last,
        "layers": [{"name": category_name(name), "bytes": sizes} for name, sizes in chart.layers.items()],
        "reserved": chart.curve,
        "peak": next((column for column, event in enumerate(chart.xs) if event >= chart.peak_event), 0),
        "area": {"left": LEFT, "width": WIDTH - LEFT - RIGHT},
        "words": {"allocated": _("allocated"), "reserved": _("reserved")},
    }


def elements(chart: Chart) -> Iterator[str]:
    """Everything in the chart, from the back to the front."""
    scale = _Scale(chart.last, chart.top)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for phase in chart.phases:
        left, end = scale.x(phase.start), scale.x(min(phase.end, chart.last))
        if phase.shaded:
            size = f'width="{end - left:.1f}" height="{bottom - TOP:.1f}"'
            yield f'<rect class="band" x="{left:.1f}" y="{TOP}" {size}/>'
        yield text(phase.name, (left + end) / 2, TOP - 6, "middle")
    for step in chart.steps:
        x = scale.x(step.start)
        yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.0f}"/>'
        yield text(step.name, x + 5, 22, "start", "ink")
    unit, name = chart.byte_unit
    yield text(name, LEFT - 6, TOP - 6, "end")
    for value in chart.y_ticks():
        y = scale.y(value * unit)
        yield _across("grid", y)
        yield text(f"{value:g}", LEFT - 6, y + 4, "end")
    for value in chart.x_ticks():
        yield text(f"{value:g}", scale.x(value), bottom + 13, "middle")
    yield from _areas(chart, scale)
    yield f'<path class="reserved" d="{_stairs(chart.xs, chart.curve, scale)}"/>'
    if chart.limit is not None:
        yield _across("limit", scale.y(chart.limit))
    x, y = scale.x(chart.peak_event), scale.y(chart.label_height) - 6 - LINE_HEIGHT * (len(chart.label) - 1)
    yield f'<circle class="peak" cx="{x:.1f}" cy="{scale.y(chart.peak):.1f}" r="4.5"/>'
    ends_there = chart.peak_event > chart.last / 2
    for number, line in enumerate(chart.label):
        yield text(
            line, x - 9 if ends_there else x + 9, y + LINE_HEIGHT * number, "end" if ends_there else "start", "ink"
        )
    yield f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{bottom}"/>'
    yield text(chart.x_label, (LEFT + right) / 2, HEIGHT - 6, "middle")


def _areas(chart: Chart, scale: _Scale) -> Iterator[str]:
    """One path from each category's sum with those below it down to zero: what lies below is drawn over it."""
    roof, areas = [0] * len(chart.xs), list[str]()
    for category, sizes in chart.layers.items():
        roof = [low + size for low, size in zip(roof, sizes, strict=True)]
        way = f"{_stairs(chart.xs, roof, scale)}V{scale.y(0):.1f}H{scale.x(chart.xs[0]):.1f}Z"
        title = f"<title>{escape(category_name(category))}</title>"
        areas.append(f'<path d="{way}" fill="var(--{category})">{title}</path>')
    yield from reversed(areas)


def _stairs(xs: Sequence[int], ys: Sequence[int], scale: _Scale) -> str:
    """A line that holds each value until the next one; runs of one value are one stroke."""
    if not xs:
        return ""
    jumps = (f"H{scale.x(xs[i]):.1f}V{scale.y(ys[i]):.1f}" for i in range(1, len(xs)) if ys[i] != ys[i - 1])
    return f"M{scale.x(xs[0]):.1f} {scale.y(ys[0]):.1f}{''.join(jumps)}H{WIDTH - RIGHT:.1f}"


def _across(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def text(words: str, x: float, y: float, anchor: str, kind: str = "") -> str:
    """Words at a point; nothing where there are none."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>' if words else ""
