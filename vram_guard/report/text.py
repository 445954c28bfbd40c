"""The report in a terminal: what the step takes, where its peak is, what the plan changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.limits import LISTED_ON_SCREEN
from vram_guard.plan import Plan
from vram_guard.report._console import as_text, is_unicode, words
from vram_guard.report._console import show as show_report
from vram_guard.report._content import Content, Section
from vram_guard.terminal import display_width
from vram_guard.timeline import Estimate
from vram_guard.units import format_bytes

DEFAULT_WIDTH = 80
BAR_WIDTH = 40
BAR_NAME = 11
_STYLES = {"fits": "bold green", "over": "bold red", "unknown": "bold yellow"}


@dataclass(frozen=True)
class _Signs:
    """The signs to draw with."""

    used: str
    free: str
    over: str
    bullet: str
    table: box.Box


_UNICODE = _Signs("█", "░", "▒", "•", box.SIMPLE_HEAD)
_ASCII = _Signs("#", ".", "!", "-", box.ASCII2)


def render(
    answer: Plan | Estimate,
    *,
    budget: Budget | None = None,
    console: Console | None = None,
    width: int | None = None,
    unicode: bool | None = None,
    verbose: bool = True,
) -> str:
    """The report as plain text; with a console it is printed there too, in colour where that can show it.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is compared with; a plan brings its own.
        console: where to print.
        width: columns; None: the console's, else 80.
        unicode: whether to draw with more than ASCII; None: where the console, or standard output, is UTF.
        verbose: False: about a dozen lines.
    """
    if unicode is None:
        unicode = is_unicode(console.encoding if console else None)
    report = _report(answer, budget, unicode=unicode, verbose=verbose)
    if console is not None:
        console.print(report, width=width)
        width = width or console.width
    return as_text(report, width or DEFAULT_WIDTH)


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
    return show_report(lambda unicode: _report(answer, budget, unicode=unicode, verbose=verbose), DEFAULT_WIDTH, file)


def _report(answer: Plan | Estimate, budget: Budget | None, *, unicode: bool, verbose: bool) -> Group:
    parts = _parts if verbose else _brief
    return Group(*parts(Content.of(answer, budget), _UNICODE if unicode else _ASCII))


def _brief(content: Content, signs: _Signs) -> Iterator[RenderableType]:
    """The verdict, the step as written, the change in one line, its cost, and what makes the answer uncertain."""
    yield from _verdict(content, signs)
    yield from _bars(content, signs)
    yield from _drawn(Section("", content.brief_facts()), signs)
    yield from _drawn(content.other_gpus(), signs)
    yield from _drawn(Section.listed("", content.brief_reasons()), signs)
    yield from _drawn(Section.listed(_("Notes"), content.brief_notes()), signs)


def _verdict(content: Content, signs: _Signs) -> Iterator[RenderableType]:
    if content.budget is not None:
        kind, head, figures = content.verdict(content.budget)
        if line := content.headline(content.budget):
            yield words(line, "bold")
        yield words(f"{head.upper()}  {figures}", _STYLES[kind])
    yield from _drawn(Section.listed("", content.cautions()), signs)
    yield from _drawn(Section.listed(_("Memory that grows"), content.leaks()), signs)


def _bars(content: Content, signs: _Signs) -> Iterator[RenderableType]:
    if content.budget is not None:
        for name, peak in content.bars():
            yield _bar(name, peak, content.budget, signs)


def _parts(content: Content, signs: _Signs) -> Iterator[RenderableType]:
    yield from _verdict(content, signs)
    yield from _bars(content, signs)
    if content.budget is not None:
        yield words(_("Budget: {budget}", budget=content.budget.explain()), "dim")
    notes = Section.listed(_("Notes"), content.notes())
    for section in (*content.memory(LISTED_ON_SCREEN), notes, *content.planned(LISTED_ON_SCREEN)):
        yield from _drawn(section, signs)


def _drawn(section: Section, signs: _Signs) -> Iterator[RenderableType]:
    """The title and the rows: a list, a table, or names and their values without lines."""
    if not section.rows:
        return
    if section.title:
        yield Text(f"\n{section.title}", style="bold")
    if len(section.rows[0]) == 1:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(width=3, justify="right")
        rows: Sequence[Sequence[str]] = [(signs.bullet, *row) for row in section.rows]
    else:
        table, rows = Table(box=None, show_header=False, padding=(0, 1, 0, 2)), section.rows
        if section.heads:
            table = Table(*section.heads, box=signs.table, pad_edge=False)
    for row in rows:
        table.add_row(*map(words, row))
    for number, column in enumerate(table.columns):
        column.overflow = "fold"
        if 0 < number <= section.figures:
            column.justify, column.no_wrap = "right", True
    yield table


def _bar(name: str, peak: int, budget: Budget, signs: _Signs) -> Text:
    """The reserved peak against the usable bytes; what is over the budget is drawn otherwise."""
    usable = budget.usable
    whole = max(peak, usable)
    filled = round(BAR_WIDTH * min(peak, usable) / whole)
    over = round(BAR_WIDTH * max(0, peak - usable) / whole)
    if peak > usable and not over:
        filled, over = BAR_WIDTH - 1, 1  # a miss by a byte is a miss
    bar = Text(name + " " * max(1, BAR_NAME - display_width(name)) + "[")
    bar.append(signs.used * filled, style="green" if not over else "yellow")
    bar.append(signs.over * over, style="bold red")
    bar.append(signs.free * (BAR_WIDTH - filled - over), style="dim")
    share = f"{peak / usable:.0%}"
    bar.append("] " + _("{share} of {usable}", share=share, usable=format_bytes(usable)))
    return bar
