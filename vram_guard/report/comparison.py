"""The tables of compared configurations and of a model's variants, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TextIO

from vram_guard.language import _
from vram_guard.plan.comparison import Compared, Comparison
from vram_guard.plan.variants import Variants
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
    if isinstance(answer, Variants):
        chosen = answer.chosen
        return {
            "kind": "variants",
            "chosen": None if chosen is None else chosen.name,
            "batch_size": answer.batch_size,
            "usable": answer.compared_budget.usable,
            "budget": answer.compared_budget.explain(),
            "variants": [_variant_dict(row) for row in answer.rows],
        }
    return {
        "kind": "comparison",
        "all_fit": answer.all_fit,
        "usable": answer.compared_budget.usable,
        "total": answer.budget.total,
        "budget": answer.compared_budget.explain(),
        "configurations": [_configuration_dict(answer, row) for row in answer.rows],
    }


def _variant_dict(row: Compared) -> dict[str, Any]:
    own = {"parameters": row.parameters, "peak_reserved": row.peak, "fits": row.fits}
    largest = {"fits_as_written": row.fits_as_written, "largest_batch_size": row.largest_batch_size}
    return {"name": row.name, **own, **largest, **_plan_dict(row)}


def _configuration_dict(answer: Comparison, row: Compared) -> dict[str, Any]:
    names = ("name", "batch_size", "precision", "accumulate", "learning_rate", "suggested_learning_rate")
    peak = {"peak_reserved": row.peak, "utilization": row.utilization, "fits": row.fits}
    speed = {"modelled_seconds": row.seconds, "relative_speed": answer.relative_speed(row)}
    return {**{name: getattr(row, name) for name in names}, **peak, **_plan_dict(row), **speed}


def _plan_dict(row: Compared) -> dict[str, Any]:
    return {"plan": None if row.plan is None else as_dict(row.plan), "error": row.error or None}


# --- the table -----------------------------------------------------------------------------------------------------


def _report(answer: Comparison, width: int) -> Iterator[Line]:
    if isinstance(answer, Variants):
        yield from in_lines(answer.choice(), width, "1;31" if answer.chosen is None else "1;32")
    drawn = list(_variant_columns(answer) if isinstance(answer, Variants) else _configuration_columns(answer))
    titles = [title for title, _cell, _number in drawn]
    rows = [[printable(cell(row), lines=False) for _title, cell, _number in drawn] for row in answer.rows]
    lines = columns([titles, *rows], to_the_right=lambda index, _cell: drawn[index][2], indent=1, width=width)
    yield from map(Line, [*lines, ""])
    for note in (_("Budget: {budget}", budget=answer.compared_budget.explain()), *_notes(answer)):
        yield from in_lines(note, width, "2")
    if answer.releases is not None:
        yield from in_lines(_("Releases: {releases}", releases=answer.releases), width, "2")


def _variant_columns(answer: Variants) -> Iterator[_Column]:
    chosen = answer.chosen
    yield _("variant"), lambda row: row.name + (" *" if row is chosen else ""), False
    yield _("parameters"), lambda row: "-" if row.parameters is None else f"{row.parameters:,}", True
    yield _("as written"), _peak, True
    yield _("of budget"), _share_of_budget, True
    yield _("largest batch"), lambda row: "-" if row.largest_batch_size is None else str(row.largest_batch_size), True
    if any(row.fits and not row.fits_as_written for row in answer.rows):
        yield _("step time"), _slowdown, True
    yield _("batch of {count}", count=answer.batch_size), Compared.verdict, False


def _configuration_columns(answer: Comparison) -> Iterator[_Column]:
    yield _("configuration"), lambda row: row.name, False
    yield _("samples"), lambda row: f"{row.batch_size}" + (f" x {row.accumulate}" if row.accumulate > 1 else ""), True
    yield _("precision"), lambda row: row.precision, True
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
    if isinstance(answer, Variants):
        return
    yield _("speed: samples per second relative to the first row, by the step-time model under the plan")
    if _has_rates(answer):
        if answer.rates_by_rule:
            yield _("learning rate: the config's, as the rule scales it with the batch")
            return
        yield _("learning rate: as configured; in brackets where the rule of scaling it with the batch says another")


def _peak(row: Compared) -> str:
    return "-" if row.peak is None else format_bytes(row.peak)


def _share_of_budget(row: Compared) -> str:
    return "-" if row.plan is None else f"{row.plan.before.peak_reserved / row.plan.budget.usable:.0%}"


def _slowdown(row: Compared) -> str:
    return _times(row.plan.slowdown if row.plan is not None and row.fits else None)


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"x {factor:.2f}"


def _rate(row: Compared) -> str:
    if row.learning_rate is None:
        return "-" if row.suggested_learning_rate is None else f"({row.suggested_learning_rate:g})"
    given, suggested = f"{row.learning_rate:g}", row.suggested_learning_rate
    if suggested is None or f"{suggested:g}" == given:
        return given
    return f"{given} ({suggested:g})"
