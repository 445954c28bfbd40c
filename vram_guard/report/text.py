"""The report in a terminal: what the step takes, where its peak is, what the plan changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TextIO

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.limits import LISTED_ON_SCREEN
from vram_guard.plan import Plan
from vram_guard.printable import printable
from vram_guard.report._content import Content, Section
from vram_guard.report._lines import Line, as_text, in_lines, is_unicode
from vram_guard.report._lines import show as show_lines
from vram_guard.report.columns import columns
from vram_guard.terminal import display_width
from vram_guard.timeline import Estimate
from vram_guard.units import format_bytes

DEFAULT_WIDTH = 80
BAR_WIDTH = 40
BAR_NAME = 11
_BOLD, _DIM, _GREEN, _RED = "1", "2", "32", "31"
_STYLES = {"fits": "1;32", "over": "1;31", "unknown": "1;33"}


class _Signs(NamedTuple):
    """The signs to draw with."""

    used: str
    free: str
    over: str
    bullet: str


_UNICODE, _ASCII = _Signs("█", "░", "▒", "•"), _Signs("#", ".", "!", "-")


def render(
    answer: Plan | Estimate,
    *,
    budget: Budget | None = None,
    width: int | None = None,
    unicode: bool | None = None,
    verbose: bool = True,
) -> str:
    """The report as plain text.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is compared with; a plan brings its own.
        width: columns; None: 80.
        unicode: whether to draw with more than ASCII; None: where standard output is UTF.
        verbose: False: about a dozen lines.
    """
    unicode = is_unicode() if unicode is None else unicode
    return as_text(_report(answer, budget, unicode, width or DEFAULT_WIDTH, verbose=verbose))


def show(
    answer: Plan | Estimate, *, budget: Budget | None = None, file: TextIO | None = None, verbose: bool = True
) -> bool:
    """Print the report whatever the stream is: no terminal, another encoding than UTF-8, a closed pipe.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is compared with; a plan brings its own.
        file: the stream; None: standard output.
        verbose: False: about a dozen lines.

    Returns:
        False where the stream is no longer read; training must not end because of that.
    """
    return show_lines(
        lambda unicode, width: _report(answer, budget, unicode, width, verbose=verbose), DEFAULT_WIDTH, file
    )


def _report(
    answer: Plan | Estimate, budget: Budget | None, unicode: bool, width: int, *, verbose: bool
) -> Iterator[Line]:
    content, signs = Content.of(answer, budget), _UNICODE if unicode else _ASCII
    if content.budget is not None:
        kind, head, figures = content.verdict(content.budget)
        if line := content.headline(content.budget):
            yield from in_lines(line, width, _BOLD)
        yield from in_lines(f"{head.upper()}  {figures}", width, _STYLES[kind])
    sections = [Section.listed("", content.cautions())]
    if not verbose:
        sections.append(Section.listed(_("Memory that grows"), content.leaks()))
    for section in sections:
        yield from _drawn(section, signs, width)
    if content.budget is not None:
        for name, peak in content.bars():
            bar, style = _bar(name, peak, content.budget, signs)
            yield from in_lines(bar, width, style)
    if verbose:
        if content.budget is not None:
            yield from in_lines(_("Budget: {budget}", budget=content.budget.explain()), width, _DIM)
        notes = Section.listed(_("Notes"), content.notes())
        sections = [*content.memory(LISTED_ON_SCREEN), notes, *content.planned(LISTED_ON_SCREEN)]
    else:
        sections = [*content.brief()]
    for section in sections:
        yield from _drawn(section, signs, width)


def _drawn(section: Section, signs: _Signs, width: int) -> Iterator[Line]:
    """The title and the rows: a list, a table, or names and their values."""
    if not section.rows:
        return
    if section.title:
        yield Line("")
        yield Line(section.title, _BOLD)
    if len(section.rows[0]) == 1:
        for (line,) in section.rows:
            yield from in_lines(f"  {signs.bullet} {printable(line, lines=False)}", width)
        return
    rows = [[printable(cell, lines=False) for cell in row] for row in (section.heads, *section.rows) if row]
    yield from map(
        Line,
        columns(rows, to_the_right=lambda index, _cell: 0 < index <= section.figures, indent=2, width=width),
    )


def _bar(name: str, peak: int, budget: Budget, signs: _Signs) -> Line:
    """The reserved peak against the usable bytes; what is over the budget is drawn otherwise."""
    usable = budget.usable
    whole = max(peak, usable)
    filled = round(BAR_WIDTH * min(peak, usable) / whole)
    over = round(BAR_WIDTH * max(0, peak - usable) / whole)
    if peak > usable and not over:
        filled, over = BAR_WIDTH - 1, 1  # a miss by a byte is a miss
    bar = signs.used * filled + signs.over * over + signs.free * (BAR_WIDTH - filled - over)
    share = _("{share} of {usable}", share=f"{peak / usable:.0%}", usable=format_bytes(usable))
    padded = name + " " * max(1, BAR_NAME - display_width(name))
    return Line(f"{padded}[{bar}] {share}", _RED if over else _GREEN)
