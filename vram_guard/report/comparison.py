"""The table of compared configurations, for people and for programs."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vram_guard.language import _
from vram_guard.plan.option import Option
from vram_guard.report.as_json import as_dict
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.plan.comparison import Compared, Comparison

DEFAULT_WIDTH = 118


def render(answer: Comparison, *, width: int | None = None, unicode: bool | None = None) -> str:
    """The table as plain text, the budget below it.

    Args:
        answer: what :func:`vram_guard.plan.comparison.compare` said.
        width: columns; None: 118.
        unicode: whether to draw with more than ASCII; None: where standard output is UTF.
    """
    if unicode is None:
        unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    plain = Console(file=io.StringIO(), width=width or DEFAULT_WIDTH, color_system=None, _environ={})
    with plain.capture() as captured:
        plain.print(_report(answer, unicode=unicode))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def comparison_dict(answer: Comparison) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers; amounts are ints of bytes."""
    return {
        "kind": "comparison",
        "all_fit": answer.all_fit,
        "usable": answer.budget.usable,
        "total": answer.budget.total,
        "budget": answer.budget.explain(),
        "configurations": [_row_dict(answer, row) for row in answer.rows],
    }


def _row_dict(answer: Comparison, row: Compared) -> dict[str, Any]:
    return {
        "name": row.name,
        "batch_size": row.batch_size,
        "precision": row.precision,
        "accumulate": row.accumulate,
        "learning_rate": row.learning_rate,
        "suggested_learning_rate": row.suggested_learning_rate,
        "peak_reserved": row.peak,
        "utilization": row.utilization,
        "fits": row.fits,
        "plan": None if row.plan is None else as_dict(row.plan),
        "modelled_seconds": row.seconds,
        "relative_speed": answer.relative_speed(row),
        "error": row.error or None,
    }


def _report(answer: Comparison, *, unicode: bool) -> Group:
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, pad_edge=False)
    rates = any(row.learning_rate is not None for row in answer.rows)
    table.add_column(_("configuration"), overflow="fold")
    for title in (_("batch"), _("precision"), _("peak"), _("of GPU")):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(_("plan"), overflow="fold")
    for title in (*((_("learning rate"),) if rates else ()), _("speed")):
        table.add_column(title, justify="right", no_wrap=True)
    for row in answer.rows:
        cells = _cells(row, rates=rates)
        speed = answer.relative_speed(row)
        table.add_row(*cells, "-" if speed is None else f"x {speed:.2f}", style="" if row.fits else "dim")
    notes = [_("speed: samples a second over those of the first, by the model of a step's time under the plan")]
    if rates:
        notes.append(
            _("learning rate: as configured; in brackets where the rule of scaling it with the batch says another")
        )
    lines = [Text(line, style="dim") for line in (_("Budget: {words}", words=answer.budget.explain()), *notes)]
    return Group(table, *lines)


def _cells(row: Compared, *, rates: bool) -> list[Text]:
    batch = str(row.batch_size) + (f" x {row.accumulate}" if row.accumulate > 1 else "")
    if row.peak is None or row.utilization is None:
        figures = ["-", "-"]
    else:
        figures = [format_bytes(row.peak), f"{row.utilization:.0%}"]
    cells = [row.name, batch, row.precision, *figures, _verdict(row), *([_rate(row)] if rates else [])]
    return [Text(cell) for cell in cells]


def _rate(row: Compared) -> str:
    if row.learning_rate is None:
        return "-" if row.suggested_learning_rate is None else f"({row.suggested_learning_rate:g})"
    given, suggested = f"{row.learning_rate:g}", row.suggested_learning_rate
    if suggested is None or f"{suggested:g}" == given:
        return given
    return f"{given} ({suggested:g})"


def _verdict(row: Compared) -> str:
    """What becomes of it, in a few words."""
    made = row.plan
    if made is None:
        return row.error
    if made.fits and not made.changed:
        return _("fits")
    if made.fits:
        words = Option(made.precision, made.splits, made.recipe).words(made.batch_size)
        return words.removeprefix(f"{made.precision_before}, ")
    missing = made.peak - made.budget.usable
    if missing > 0:
        return _("short by {amount}", amount=format_bytes(missing))
    return _("not known to fit: only a lower bound")
