"""The report in a terminal: what the step takes, where its peak is, what the plan changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vram_guard.language import _, display_width, marked
from vram_guard.plan.model import Plan
from vram_guard.report.categories import PHASES, category_name
from vram_guard.report.console import as_text, is_unicode
from vram_guard.report.console import show as show_report
from vram_guard.timeline import CATEGORIES, Estimate
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vram_guard.budget import Budget

DEFAULT_WIDTH = 80
BAR_WIDTH = 40
BAR_NAME = 11
TOP_MODULES = 5
MOST_REJECTED = 6

_TIERS = {
    "symbolic": marked("symbolic (every operator's memory is known)"),
    "partly symbolic": marked("partly symbolic (some sizes are bounds, see the notes)"),
    "formula": marked("formula (a lower bound, no promise that the step fits)"),
}


@dataclass(frozen=True)
class _Signs:
    """What is drawn with."""

    used: str
    free: str
    over: str
    arrow: str
    bullet: str
    table: box.Box


_UNICODE = _Signs("█", "░", "▒", "→", "•", box.SIMPLE_HEAD)
_ASCII = _Signs("#", ".", "!", "->", "-", box.ASCII2)


def render(
    answer: Plan | Estimate,
    *,
    budget: Budget | None = None,
    console: Console | None = None,
    width: int | None = None,
    unicode: bool | None = None,
) -> str:
    """The report as plain text; with a console it is printed there too, in colour where that can show it.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is held against; a plan brings its own.
        console: where to print.
        width: columns; None: the console's, else 80.
        unicode: whether to draw with more than ASCII; None: where the console, or standard output, is UTF.
    """
    if unicode is None:
        unicode = is_unicode(console.encoding if console else None)
    report = _report(answer, budget, unicode=unicode)
    if console is not None:
        console.print(report, width=width)
        width = width or console.width
    return as_text(report, width or DEFAULT_WIDTH)


def show(answer: Plan | Estimate, *, budget: Budget | None = None, file: TextIO | None = None) -> bool:
    """Print the report whatever the stream is: no terminal, another encoding than UTF-8, a closed pipe.

    Returns:
        False where nobody reads the stream any more; training must not end because of that.
    """
    return show_report(lambda unicode: _report(answer, budget, unicode=unicode), DEFAULT_WIDTH, file)


def _report(answer: Plan | Estimate, budget: Budget | None, *, unicode: bool) -> Group:
    return Group(*_parts(answer, budget, _UNICODE if unicode else _ASCII))


def _parts(answer: Plan | Estimate, budget: Budget | None, signs: _Signs) -> Iterator[RenderableType]:
    if isinstance(answer, Plan):
        yield from _plan_parts(answer, signs)
        return
    if budget is not None:
        budget = budget.for_tier(answer.tier)
        yield _verdict(answer.peak_reserved, budget, answer.fits(budget))
    yield _table(answer, None, signs)
    if budget is not None:
        yield _bar(_("needed"), answer.peak_reserved, budget, signs)
        yield Text(_("Budget: {budget}", budget=budget.explain()), style="dim")
    yield from _details(answer, signs)


def _plan_parts(plan: Plan, signs: _Signs) -> Iterator[RenderableType]:
    yield _verdict(plan.peak, plan.budget, plan.fits)
    yield _table(plan.estimate, plan.before if plan.changed else None, signs)
    if plan.changed:
        yield _bar(_("as written"), plan.before.peak_reserved, plan.budget, signs)
    yield _bar(_("planned") if plan.changed else _("as written"), plan.estimate.peak_reserved, plan.budget, signs)
    yield Text(_("Budget: {budget}", budget=plan.budget.explain()), style="dim")
    yield from _details(plan.estimate, signs)
    yield _heading(_("Plan"))
    yield _changes(plan, signs)
    yield from _bullets(_("Why"), plan.reasons, signs)
    closest = sorted(plan.rejected, key=lambda option: (option.missing == 0, option.missing))[:MOST_REJECTED]
    more = len(plan.rejected) - len(closest)
    lines = [*map(str, closest), *([_("and {count} more", count=more)] if more else [])]
    yield from _bullets(_("Alternatives considered, closest first"), lines, signs)


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")


def _verdict(peak: int, budget: Budget, fitting: bool) -> Text:
    needed, usable = format_bytes(peak), format_bytes(budget.usable)
    between = format_bytes(abs(budget.usable - peak))
    if fitting:
        words = _("FITS  {peak} of {usable} usable, {spare} to spare", peak=needed, usable=usable, spare=between)
        return Text(words, style="bold green")
    if peak > budget.usable:
        words = _("DOES NOT FIT  {peak} of {usable} usable, {over} too much", peak=needed, usable=usable, over=between)
        return Text(words, style="bold red")
    return Text(
        _("NOT KNOWN TO FIT  at least {peak} of {usable} usable", peak=needed, usable=usable), style="bold yellow"
    )


def _table(estimate: Estimate, before: Estimate | None, signs: _Signs) -> Table:
    """Category, bytes and share; beside an estimate as written, where there is another one."""
    table = Table(box=signs.table, pad_edge=False)
    table.add_column(_("at the peak"))
    if before is not None:
        table.add_column(_("as written"), justify="right")
    table.add_column(_("bytes") if before is None else _("planned"), justify="right")
    table.add_column(_("share"), justify="right")

    def row(name: str, value: int, old: int, style: str = "") -> None:
        cells = [name, *([format_bytes(old)] if before else []), format_bytes(value)]
        part = value <= estimate.peak_allocated != 0  # the reserved peak is no part of the allocated one
        table.add_row(*cells, f"{value / estimate.peak_allocated:.1%}" if part else "", style=style)

    for category in CATEGORIES:
        value = estimate.breakdown.get(category, 0)
        old = before.breakdown.get(category, 0) if before else 0
        if value or old:
            row(category_name(category), value, old)
    table.add_section()
    row(_("peak allocated"), estimate.peak_allocated, before.peak_allocated if before else 0, "bold")
    row(_("peak reserved"), estimate.peak_reserved, before.peak_reserved if before else 0, "bold")
    return table


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


def _details(estimate: Estimate, signs: _Signs) -> Iterator[RenderableType]:
    yield _heading(_("Peak"))
    yield _peak(estimate)
    modules = [(name, size) for name, size in estimate.by_module.items() if size][:TOP_MODULES]
    if modules:
        yield _heading(_("Modules that hold most at the peak"))
        yield _modules(modules, estimate.peak_allocated)
    yield from _bullets(_("Notes"), [str(note) for note in estimate.notes], signs)


def _peak(estimate: Estimate) -> Table:
    phase = estimate.peak_phase
    where = _(PHASES[phase.name])
    if phase.step:
        where = _("{phase}, step {count}", phase=where, count=phase.step)
    table = _grid()
    for name, value in (
        (_("batch size"), str(estimate.batch_size)),
        (_("phase"), where),
        (_("module"), estimate.peak_module),
        (_("source"), estimate.peak_source),
        (_("operator"), estimate.peak_operator),
        (_("answer"), _(_TIERS[estimate.tier])),
    ):
        if value:
            table.add_row(name, Text(value))
    point = estimate.out_of_memory
    if point is not None:
        words = _(
            "{amount} asked for at {place}, {fragmented} fragmented",
            amount=format_bytes(point.requested),
            place=point.source or point.operator,
            fragmented=format_bytes(point.fragmented),
        )
        table.add_row(_("would fail"), Text(words))
    return table


def _modules(modules: list[tuple[str, int]], total: int) -> Table:
    table = _grid(right=True)
    for name, size in modules:
        table.add_row(Text(name or _("(outside any module)")), format_bytes(size), f"{size / total:.1%}")
    return table


def _changes(plan: Plan, signs: _Signs) -> Table:
    table = _grid()
    for name, before, after in plan.changes():
        table.add_row(name, Text(f"{before} {signs.arrow} {after}"))
    if not plan.changed:
        table.add_row(_("nothing changes"), "")
    if plan.slowdown is not None and plan.changed:
        table.add_row(_("modelled step time"), f"x {plan.slowdown:.2f}")
    if plan.estimate.host_peak:
        table.add_row(_("host memory"), format_bytes(plan.estimate.host_peak))
    if plan.correction != 1:
        factor = f"{plan.correction:.3f}"
        words = _("x {factor} of the prediction: {peak}", factor=factor, peak=format_bytes(plan.peak))
        table.add_row(_("earlier runs took"), words)
    return table


def _grid(*, right: bool = False) -> Table:
    """A table without lines, indented by two; ``right``: numbers in the second and third column."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(overflow="fold")
    if right:
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    else:
        table.add_column(overflow="fold")
    return table


def _bullets(title: str, lines: tuple[str, ...] | list[str], signs: _Signs) -> Iterator[RenderableType]:
    if not lines:
        return
    yield _heading(title)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=3, justify="right")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(signs.bullet, Text(line))
    yield table
