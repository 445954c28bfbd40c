"""The table of compared configurations or of a model's variants, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TextIO

from vram_guard.language import _
from vram_guard.plan.comparison import Compared, Comparison
from vram_guard.printable import printable
from vram_guard.report.as_json import as_dict
from vram_guard.report.columns import columns
from vram_guard.report.text import Line, in_lines, show_lines
from vram_guard.units import format_bytes

DEFAULT_WIDTH = 120

#: A column: its title, its cell for a row, and whether it holds numbers.
_Column = tuple[str, Callable[[Compared], str], bool]


def show(answer: Comparison, *, file: TextIO | None = None) -> bool:
    """Print the table, with the choice among variants above it and the budget below.

    Args:
        answer: what :func:`vram_guard.plan.comparison.compare` or :func:`vram_guard.variants` returned.
        file: the stream; None: standard output.

    Returns:
        False where the stream is no longer read.
    """
    return show_lines(lambda width: _report(answer, width), DEFAULT_WIDTH, file)


def comparison_dict(answer: Comparison) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers; amounts are ints of bytes."""
    own: dict[str, Any] = {"kind": "comparison", "all_fit": answer.all_fit}
    if answer.of_variants:
        own = {"kind": "variants", "chosen": None if answer.chosen is None else answer.chosen.name}
    return {
        **own,
        "usable": answer.compared_budget.usable,
        "total": answer.budget.total,
        "budget": answer.compared_budget.explain(),
        "variants" if answer.of_variants else "configurations": [_row_dict(answer, row) for row in answer.rows],
    }


def _row_dict(answer: Comparison, row: Compared) -> dict[str, Any]:
    names = ("name", "batch_size", "learning_rate", "suggested_learning_rate")
    sizes = ("parameters", "utilization", "fits", "fits_as_written", "largest_batch_size")
    return {
        **{name: getattr(row, name) for name in (*names, *sizes)},
        "precision": row.step.precision,
        "accumulate": row.step.accumulate,
        "peak_reserved": row.peak,
        "modelled_seconds": row.seconds,
        "relative_speed": answer.relative_speed(row),
        "plan": None if row.plan is None else as_dict(row.plan),
        "error": row.error or None,
    }


# --- the table -----------------------------------------------------------------------------------------------------


def _report(answer: Comparison, width: int) -> Iterator[Line]:
    if answer.of_variants:
        yield from in_lines(answer.choice(), width, "1;31" if answer.chosen is None else "1;32")
    drawn = list(_columns(answer))
    titles = [title for title, _cell, _number in drawn]
    rows = [[printable(cell(row), lines=False) for _title, cell, _number in drawn] for row in answer.rows]
    lines = columns([titles, *rows], to_the_right=lambda index, _cell: drawn[index][2], indent=1, width=width)
    yield from map(Line, [*lines, ""])
    for note in (_("Budget: {budget}", budget=answer.compared_budget.explain()), *_notes(answer)):
        yield from in_lines(note, width, "2")
    if answer.releases is not None:
        yield from in_lines(_("Releases: {releases}", releases=answer.releases), width, "2")


def _columns(answer: Comparison) -> Iterator[_Column]:
    chosen = answer.chosen if answer.of_variants else None
    title = _("variant") if answer.of_variants else _("configuration")
    yield title, lambda row: row.name + (" *" if row is chosen else ""), False
    if answer.of_variants:
        yield _("parameters"), lambda row: "-" if row.parameters is None else f"{row.parameters:,}", True
        yield _("largest batch"), _largest_batch, True
    yield _("samples"), _samples, True
    yield _("precision"), lambda row: row.step.precision, True
    yield _("peak"), _peak, True
    yield _("of GPU"), lambda row: "-" if row.utilization is None else f"{row.utilization:.0%}", True
    yield _("plan"), Compared.verdict, False
    if _has_rates(answer):
        yield _("learning rate"), _rate, True
    yield _("speed"), lambda row: _times(answer.relative_speed(row)), True


def _has_rates(answer: Comparison) -> bool:
    return any(row.learning_rate is not None for row in answer.rows)


def _notes(answer: Comparison) -> Iterator[str]:
    if len(answer.row_budgets) > 1:
        margins = _(", ").join(
            _("{amount} (margin {margin})", amount=format_bytes(one.usable), margin=f"{one.margin:.1%}")
            for one in answer.row_budgets
        )
        yield _("each row is held against what is usable for its kind of run: {amounts}", amounts=margins)
    yield _("speed: samples per second relative to the first row, by the step-time model under the plan")
    if _has_rates(answer):
        if answer.rates_by_rule:
            yield _("learning rate: the config's, as the rule scales it with the batch")
            return
        yield _("learning rate: as configured; in brackets where the rule of scaling it with the batch says another")


def _samples(row: Compared) -> str:
    return f"{row.batch_size}" + (f" x {row.step.accumulate}" if row.step.accumulate > 1 else "")


def _largest_batch(row: Compared) -> str:
    return "-" if row.largest_batch_size is None else str(row.largest_batch_size)


def _peak(row: Compared) -> str:
    return "-" if row.peak is None else format_bytes(row.peak)


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"x {factor:.2f}"


def _rate(row: Compared) -> str:
    if row.learning_rate is None:
        return "-" if row.suggested_learning_rate is None else f"({row.suggested_learning_rate:g})"
    given, suggested = f"{row.learning_rate:g}", row.suggested_learning_rate
    if suggested is None or f"{suggested:g}" == given:
        return given
    return f"{given} ({suggested:g})"
