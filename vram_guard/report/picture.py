"""The memory of a step over its events as one SVG picture: a file of its own, or a part of the page.

Nothing but the standard library is needed. Coordinates are written with one decimal, a tenth of a pixel. On the page,
colours are its CSS variables; in a file they are written out, for image viewers know none.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.language import _
from vram_guard.module_names import with_class
from vram_guard.printable import printable
from vram_guard.report._charts import Chart, timeline_charts
from vram_guard.report.words import category_name
from vram_guard.terminal import display_width
from vram_guard.timeline import STEP_PHASES, phase_words
from vram_guard.units import format_bytes

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
#: Phases narrower than this share of the width have no room for their name.
LEAST_LABELLED = 0.05
#: Values along an axis.
MOST_TICKS = 7
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


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
    drawn = drawing(timeline_charts(answer, timeline, budget))
    drawn = drawn.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
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


def escape(text: str) -> str:
    """The text for an element or a quoted attribute of HTML and SVG, whatever characters it has."""
    return html.escape(printable(text))


def _stacked(charts: Sequence[Chart]) -> Iterator[str]:
    for number, chart in enumerate(charts):
        top = (_CAPTION + HEIGHT) * number
        yield f'<g font-size="14">{_text(chart.caption, LEFT, top + 22, "start", "ink")}'
        yield f"{_text(chart.remark, WIDTH - RIGHT, top + 22, 'end')}</g>\n"
        yield f'<g transform="translate(0 {top + _CAPTION:.0f})">{"".join(_elements(chart))}</g>\n'
    x, y = LEFT, (_CAPTION + HEIGHT) * len(charts) + 10
    for category in dict.fromkeys(name for chart in charts for name in chart.stack.layers):
        name = str(category_name(category))
        yield f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="var(--{category})"/>'
        yield _text(name, x + 14, y, "start")
        x += _SWATCH + _SIGN * display_width(name)
    budget = [_("dashed: budget")] if any(_has_limit(chart) for chart in charts) else []
    for name in (_("line: reserved"), *budget):
        yield _text(name, x, y, "start")
        x += _SWATCH / 2 + _SIGN * display_width(name)


def _has_limit(chart: Chart) -> bool:
    """True where the budget is not beyond the scale."""
    return chart.usable is not None and chart.usable <= chart.top


class _Scale(NamedTuple):
    """From events and bytes to pixels."""

    last: int
    top: int

    def x(self, event: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * event / self.last

    def y(self, size: float) -> float:
        """Pixels from above."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / self.top


def _elements(chart: Chart) -> Iterator[str]:
    """Everything in the chart, from the back to the front."""
    scale = _Scale(max(1, len(chart.timeline.events) - 1), chart.top)
    yield from _phases(chart.timeline, scale)
    unit, name = next((unit, name) for unit, name in _UNITS if chart.top >= unit)
    yield _text(name, LEFT - 6, TOP - 6, "end")
    for value in _round_values(chart.top / unit):
        y = scale.y(value * unit)
        yield _across("grid", y)
        yield _text(f"{value:g}", LEFT - 6, y + 4, "end")
    for value in _round_values(scale.last):
        if value == int(value):
            yield _text(f"{value:g}", scale.x(value), HEIGHT - BOTTOM + 13, "middle")
    yield from _areas(chart, scale)
    yield f'<path class="reserved" d="{_stairs(chart.stack.events, chart.stack.reserved, scale)}"/>'
    if chart.usable is not None and _has_limit(chart):
        yield _across("limit", scale.y(chart.usable))
    yield from _peak(chart, scale)
    yield _text(_("allocations and frees, in order"), (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle")


def _phases(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """Every other phase in a band, the names of those that have room for it, and where each step begins."""
    bottom = HEIGHT - BOTTOM
    steps: dict[int, int] = {}
    for index, (phase, end) in enumerate(timeline.spans()):
        left, right = scale.x(phase.start), scale.x(min(end, scale.last))
        if index % 2 == 1 and end > phase.start:
            size = f'width="{right - left:.1f}" height="{bottom - TOP:.1f}"'
            yield f'<rect class="band" x="{left:.1f}" y="{TOP}" {size}/>'
        if end - phase.start >= LEAST_LABELLED * len(timeline.events):
            yield _text(str(phase_words(phase)), (left + right) / 2, TOP - 6, "middle")
        if phase.step and phase.name in STEP_PHASES:
            steps.setdefault(phase.step, phase.start)
    for step, start in steps.items():
        x = scale.x(start)
        yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.0f}"/>'
        yield _text(_("step {count}", count=step), x + 5, 22, "start", "ink")


def _areas(chart: Chart, scale: _Scale) -> Iterator[str]:
    """One path from each category's sum with those below it down to zero: what lies below is drawn over it."""
    xs = chart.stack.events
    roof, areas = [0] * len(xs), list[str]()
    for category, sizes in chart.stack.layers.items():
        roof = [low + size for low, size in zip(roof, sizes, strict=True)]
        way = f"{_stairs(xs, roof, scale)}V{scale.y(0):.1f}H{scale.x(xs[0]):.1f}Z"
        title = f"<title>{escape(category_name(category))}</title>"
        areas.append(f'<path d="{way}" fill="var(--{category})">{title}</path>')
    yield from reversed(areas)


def _stairs(xs: Sequence[int], ys: Sequence[int], scale: _Scale) -> str:
    """A line that holds each value until the next one; runs of one value are one stroke."""
    if not xs:
        return ""
    jumps = (f"H{scale.x(xs[i]):.1f}V{scale.y(ys[i]):.1f}" for i in range(1, len(xs)) if ys[i] != ys[i - 1])
    return f"M{scale.x(xs[0]):.1f} {scale.y(ys[0]):.1f}{''.join(jumps)}H{WIDTH - RIGHT:.1f}"


def _peak(chart: Chart, scale: _Scale) -> Iterator[str]:
    """The highest point of what is allocated, and beside it, above the curves, what and where it is."""
    estimate = chart.estimate
    event = chart.timeline.replay(estimate.batch_size).peak_event
    peak = _("peak {amount}", amount=format_bytes(estimate.peak_allocated))
    first = (peak, str(phase_words(estimate.peak_phase)), with_class(estimate.peak_module))
    lines = [_(", ").join(filter(None, words)) for words in (first, (estimate.peak_source, estimate.peak_operator))]
    lines = [printable(line, lines=False) for line in lines if line]
    around = [size for at, size in zip(chart.stack.events, chart.stack.reserved, strict=True) if at <= event]
    x, y = scale.x(event), scale.y(max(around, default=0)) - 6 - LINE_HEIGHT * (len(lines) - 1)
    yield f'<circle class="peak" cx="{x:.1f}" cy="{scale.y(estimate.peak_allocated):.1f}" r="4.5"/>'
    beside, anchor = (x - 9, "end") if event > scale.last / 2 else (x + 9, "start")
    for number, line in enumerate(lines):
        yield _text(line, beside, y + LINE_HEIGHT * number, anchor, "ink")


def _round_values(end: float) -> list[float]:
    """A few values from 0 to ``end``, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(max(end, 1e-9) / MOST_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= MOST_TICKS)
    return [*accumulate([step] * int(end / step), initial=0.0)]


def _across(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(words: str, x: float, y: float, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
