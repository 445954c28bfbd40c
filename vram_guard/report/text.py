"""The report in a terminal: what the step takes, where its peak is, what the plan changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TextIO

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.limits import LISTED_ON_SCREEN
from vram_guard.plan import Plan
from vram_guard.printable import printable
from vram_guard.report._content import Content, Section
from vram_guard.report.columns import columns
from vram_guard.terminal import encodable, terminal_width, wrapped_line
from vram_guard.timeline import Estimate

DEFAULT_WIDTH = 80
_BOLD, _DIM = "1", "2"
_STYLES = {"fits": "1;32", "over": "1;31", "unknown": "1;33"}


class Line(NamedTuple):
    """A line, and how a terminal shows it: parameters of ECMA-48's SGR, such as "1;32" for bold and green."""

    text: str
    style: str = ""


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
    return _as_text(_report(answer, budget, width or DEFAULT_WIDTH, verbose=verbose))


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
        sections = [*content.memory(LISTED_ON_SCREEN), *content.planned(LISTED_ON_SCREEN)]
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


def in_lines(text: str, width: int, style: str = "") -> Iterator[Line]:
    """A text, whatever characters it has, in lines of at most so many columns."""
    for line in printable(text).split("\n"):
        yield from (Line(one, style) for one in wrapped_line(line, width))


def _as_text(lines: Iterable[Line]) -> str:
    """The lines without styles, and without spaces at their ends."""
    return "".join(f"{line.text.rstrip()}\n" for line in lines)


def show_lines(report: Callable[[int], Iterable[Line]], width: int, file: TextIO | None = None) -> bool:
    """Print a report whatever the stream is, in colour where that is a terminal.

    Args:
        report: makes it, in so many columns.
        width: columns where the stream is not a terminal.
        file: the stream; None: standard output.

    Returns:
        False where the stream is no longer read; training must not end because of that.
    """
    stream = file or sys.stdout
    terminal = terminal_width(stream)
    lines = report(terminal or width)
    if terminal is not None and os.name == "posix" and "NO_COLOR" not in os.environ:
        lines = [Line(f"\x1b[{line.style}m{line.text}\x1b[0m" if line.style else line.text) for line in lines]
    try:
        stream.write(encodable(_as_text(lines), stream))
        stream.flush()
    except (BrokenPipeError, ValueError):  # ValueError: the stream was closed on our side
        return False
    return True
