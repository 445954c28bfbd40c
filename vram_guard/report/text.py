"""The report in a terminal: what the step takes, where its peak is, what the plan changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.limits import LISTED_ON_SCREEN
from vram_guard.plan import Plan
from vram_guard.printable import printable
from vram_guard.report._content import Content, Section
from vram_guard.report._lines import Line, as_text, in_lines
from vram_guard.report._lines import show as show_lines
from vram_guard.report.columns import columns
from vram_guard.timeline import Estimate

DEFAULT_WIDTH = 80
_BOLD, _DIM = "1", "2"
_STYLES = {"fits": "1;32", "over": "1;31", "unknown": "1;33"}


def render(
    answer: Plan | Estimate, *, budget: Budget | None = None, width: int | None = None, verbose: bool = True
) -> str:
    """The report as plain text.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is compared with; a plan brings its own.
        width: columns; None: 80.
        verbose: False: about a dozen lines.
    """
    return as_text(_report(answer, budget, width or DEFAULT_WIDTH, verbose=verbose))


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
    return show_lines(lambda width: _report(answer, budget, width, verbose=verbose), DEFAULT_WIDTH, file)


def _report(answer: Plan | Estimate, budget: Budget | None, width: int, *, verbose: bool) -> Iterator[Line]:
    content = Content.of(answer, budget)
    if content.budget is not None:
        kind, head, figures = content.verdict(content.budget)
        if line := content.headline(content.budget):
            yield from in_lines(line, width, _BOLD)
        yield from in_lines(f"{head.upper()}  {figures}", width, _STYLES[kind])
    yield from _drawn(Section.listed("", content.cautions()), width)
    if verbose:
        if content.budget is not None:
            yield from in_lines(_("Budget: {budget}", budget=content.budget.explain()), width, _DIM)
        notes = Section.listed(_("Notes"), content.notes())
        sections = [*content.memory(LISTED_ON_SCREEN), notes, *content.planned(LISTED_ON_SCREEN)]
    else:
        sections = [*content.brief()]
    for section in sections:
        yield from _drawn(section, width)


def _drawn(section: Section, width: int) -> Iterator[Line]:
    """The title and the rows: a list, a table, or names and their values."""
    if not section.rows:
        return
    if section.title:
        yield Line("")
        yield Line(section.title, _BOLD)
    if len(section.rows[0]) == 1:
        for (line,) in section.rows:
            yield from in_lines(f"  - {printable(line, lines=False)}", width)
        return
    rows = [[printable(cell, lines=False) for cell in row] for row in (section.heads, *section.rows) if row]
    yield from map(
        Line,
        columns(rows, to_the_right=lambda index, _cell: 0 < index <= section.figures, indent=2, width=width),
    )
