"""The memory of a step over its events as one SVG picture: a file of its own, or a part of the page.

Nothing but the standard library is needed. Coordinates are written with one decimal, a tenth of a pixel. On the page,
colours are its CSS variables; in a file they are written out, for image viewers know none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.language import _
from vram_guard.report._charts import Chart, timeline_charts
from vram_guard.report._markup import escape
from vram_guard.report.categories import category_name
from vram_guard.terminal import display_width

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate, Timeline

WIDTH, HEIGHT = 960.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 46.0, 36.0
#: Pixels from one line of a label to the next.
LINE_HEIGHT = 13
#: Pixels above a chart for its caption, below all of them for the legend, beside its words, and of each of their signs.
_CAPTION, _LEGEND, _SWATCH, _SIGN = 30, 28, 24, 6.2


def picture(
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
) -> str:
    """The picture as SVG text: the step as written above the step as planned, on one scale; one chart for an estimate.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.

    Raises:
        InvalidInputError: there is no timeline.
    """
    charts = timeline_charts(answer, timeline, budget)
    drawn = drawing(charts).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    page = (files("vram_guard.report") / "assets" / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--(\w+): (#\w+);", page.split("}", 1)[0]))
    rules = "".join(f"{rule}\n" for rule in re.findall(r"svg (?:text|\.|circle)[^{]*\{[^}]*\}", page))
    behind = f'\n<style>\n{rules}</style>\n<rect width="100%" height="100%" fill="var(--page)"/>\n'
    return re.sub(r"var\(--(\w+)\)", lambda name: colours[name[1]], drawn.replace("\n", behind, 1))


def drawing(charts: Sequence[Chart]) -> str:
    """The charts below each other as one SVG element, with one legend; colours by their names."""
    height = (_CAPTION + HEIGHT) * len(charts) + _LEGEND
    said = escape(" ".join(chart.description for chart in charts))
    size = f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}" height="{height:.0f}"'
    head = f'<svg {size} role="img" aria-label="{said}" font-family="sans-serif" font-size="11">'
    return f"{head}\n{''.join(_stacked(charts))}</svg>\n"


def _stacked(charts: Sequence[Chart]) -> Iterator[str]:
    for number, chart in enumerate(charts):
        top = (_CAPTION + HEIGHT) * number
        yield f'<g font-size="14">{_text(chart.caption, LEFT, top + 22, "start", "ink")}'
        yield f"{_text(chart.remark, WIDTH - RIGHT, top + 22, 'end')}</g>\n"
        yield f'<g transform="translate(0 {top + _CAPTION:.0f})">{"".join(_elements(chart))}</g>\n'
    x, y = LEFT, (_CAPTION + HEIGHT) * len(charts) + 10
    for category in dict.fromkeys(name for chart in charts for name in chart.layers):
        name = str(category_name(category))
        yield f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="var(--{category})"/>'
        yield _text(name, x + 14, y, "start")
        x += _SWATCH + _SIGN * display_width(name)
    budget = [_("dashed: budget")] if any(chart.limit is not None for chart in charts) else []
    for name in (_("line: reserved"), *budget):
        yield _text(name, x, y, "start")
        x += _SWATCH / 2 + _SIGN * display_width(name)


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


def _elements(chart: Chart) -> Iterator[str]:
    """Everything in the chart, from the back to the front."""
    scale = _Scale(chart.last, chart.top)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for phase in chart.phases:
        left, end = scale.x(phase.start), scale.x(min(phase.end, chart.last))
        if phase.shaded:
            size = f'width="{end - left:.1f}" height="{bottom - TOP:.1f}"'
            yield f'<rect class="band" x="{left:.1f}" y="{TOP}" {size}/>'
        yield _text(phase.name, (left + end) / 2, TOP - 6, "middle")
    for step in chart.steps:
        x = scale.x(step.start)
        yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.0f}"/>'
        yield _text(step.name, x + 5, 22, "start", "ink")
    unit, name = chart.byte_unit
    yield _text(name, LEFT - 6, TOP - 6, "end")
    for value in chart.y_ticks():
        y = scale.y(value * unit)
        yield _across("grid", y)
        yield _text(f"{value:g}", LEFT - 6, y + 4, "end")
    for value in chart.x_ticks():
        yield _text(f"{value:g}", scale.x(value), bottom + 13, "middle")
    yield from _areas(chart, scale)
    yield f'<path class="reserved" d="{_stairs(chart.xs, chart.curve, scale)}"/>'
    if chart.limit is not None:
        yield _across("limit", scale.y(chart.limit))
    x, y = scale.x(chart.peak_event), scale.y(chart.label_height) - 6 - LINE_HEIGHT * (len(chart.label) - 1)
    yield f'<circle class="peak" cx="{x:.1f}" cy="{scale.y(chart.peak):.1f}" r="4.5"/>'
    beside, anchor = (x - 9, "end") if chart.peak_event > chart.last / 2 else (x + 9, "start")
    for number, line in enumerate(chart.label):
        yield _text(line, beside, y + LINE_HEIGHT * number, anchor, "ink")
    yield _text(_("allocations and frees, in order"), (LEFT + right) / 2, HEIGHT - 6, "middle")


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


def _text(words: str, x: float, y: float, anchor: str, kind: str = "") -> str:
    """Words at a point; nothing where there are none."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>' if words else ""
