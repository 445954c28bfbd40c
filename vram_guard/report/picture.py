"""The memory of a step over its events as one SVG picture, for documents and image viewers: the charts of the page.

Nothing but the standard library is needed. Colours are written out, for image viewers know no CSS variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.report._charts import Chart, lines_drawn, timeline_charts
from vram_guard.report._svg import COLUMNS, HEIGHT, LEFT, RIGHT, WIDTH, elements, text
from vram_guard.report.categories import category_name
from vram_guard.report.files import write_atomically
from vram_guard.terminal import display_width

if TYPE_CHECKING:
    import os

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate, Timeline

#: Pixels above a chart for its caption, below all of them for the legend, beside its words, and of each of their signs.
_CAPTION, _LEGEND, _SWATCH, _SIGN = 30, 28, 24, 6.2


def picture(
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
) -> str:
    """The picture as SVG text: the step as written above the step as planned, on one scale; one chart for an estimate.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.
        settings: the allocator's settings; None: PyTorch's defaults.

    Raises:
        InvalidInputError: there is no timeline.
    """
    charts = timeline_charts(answer, timeline, budget, settings, COLUMNS)
    height = (_CAPTION + HEIGHT) * len(charts) + _LEGEND
    return _in_colours(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="var(--page)"/>\n{"".join(_stacked(charts))}</svg>\n'
    )


def save_picture(
    answer: Plan | Estimate,
    path: str | os.PathLike[str],
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
) -> bool:
    """Write :func:`picture` to a file, whole or not at all.

    Returns:
        Whether it was written; where it could not be, a warning says why.

    Raises:
        InvalidInputError: the name does not end in .svg, or there is no timeline.
    """
    check_picture_name(path)
    return write_atomically(path, picture(answer, timeline=timeline, budget=budget, settings=settings))


def check_picture_name(path: str | os.PathLike[str]) -> None:
    """Refuse a name that does not end in .svg.

    Raises:
        InvalidInputError: it does not.
    """
    if Path(path).suffix.lower() != ".svg":
        raise InvalidInputError(_("{path}: the picture is written as .svg", path=path))


def _stacked(charts: Sequence[Chart]) -> Iterator[str]:
    """The charts below each other, with one legend."""
    for number, chart in enumerate(charts):
        top = (_CAPTION + HEIGHT) * number
        yield f'<g font-size="14">{text(chart.caption, LEFT, top + 22, "start", "ink")}'
        yield f"{text(chart.remark, WIDTH - RIGHT, top + 22, 'end')}</g>\n"
        yield f'<g transform="translate(0 {top + _CAPTION:.0f})">{"".join(elements(chart))}</g>\n'
    x, y = LEFT, (_CAPTION + HEIGHT) * len(charts) + 10
    for category in dict.fromkeys(name for chart in charts for name in chart.layers):
        name = str(category_name(category))
        yield f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="var(--{category})"/>'
        yield text(name, x + 14, y, "start")
        x += _SWATCH + _SIGN * display_width(name)
    for name in lines_drawn(charts):
        yield text(name, x, y, "start")
        x += _SWATCH / 2 + _SIGN * display_width(name)


def _in_colours(drawn: str) -> str:
    """With the page's rules for charts, and its light colours in place of their names."""
    page = (files("vram_guard.report") / "assets" / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--(\w+): (#\w+);", page.split("}", 1)[0]))
    rules = "".join(f"{rule}\n" for rule in re.findall(r"svg (?:text|\.|circle)[^{]*\{[^}]*\}", page))
    drawn = drawn.replace("\n", f"\n<style>\n{rules}</style>\n", 1)
    return re.sub(r"var\(--(\w+)\)", lambda name: colours[name[1]], drawn)
