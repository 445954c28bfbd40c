"""The table of a model's variants, for people and for programs."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vram_guard.report.as_json import SCHEMA, as_dict
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.plan.variants import Variant, Variants

DEFAULT_WIDTH = 100


def render(answer: Variants, *, width: int | None = None, unicode: bool | None = None) -> str:
    """The table as plain text, with the choice above it and the budget below.

    Args:
        answer: what :func:`vram_guard.variants` said.
        width: columns; None: 100.
        unicode: whether to draw with more than ASCII; None: where standard output is UTF.
    """
    if unicode is None:
        unicode = _is_unicode(getattr(sys.stdout, "encoding", None))
    plain = Console(file=io.StringIO(), width=width or DEFAULT_WIDTH, color_system=None, _environ={})
    with plain.capture() as captured:
        plain.print(_report(answer, unicode=unicode))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def show(answer: Variants, *, file: TextIO | None = None) -> bool:
    """Print the table, in colour where the stream is a terminal.

    Returns:
        False where nobody reads the stream any more.
    """
    stream = file or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        if stream.isatty() and _is_unicode(encoding):
            Console(file=stream).print(_report(answer, unicode=True))
        else:
            text = render(answer, unicode=_is_unicode(encoding))
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (BrokenPipeError, ValueError):  # ValueError: the stream was closed on our side
        return False
    return True


def variants_dict(answer: Variants) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers; amounts are ints of bytes."""
    chosen, rows = answer.chosen, [_row_dict(row) for row in answer.rows]
    return {
        "schema": SCHEMA,
        "kind": "variants",
        "chosen": None if chosen is None else chosen.name,
        "prefer": answer.prefer,
        "batch_size": answer.batch_size,
        "usable": answer.budget.usable,
        "budget": answer.budget.explain(),
        "variants": rows,
    }


def variants_json(answer: Variants) -> str:
    """The answer as JSON text; pure ASCII."""
    return json.dumps(variants_dict(answer), indent=2, allow_nan=False)


def _row_dict(row: Variant) -> dict[str, Any]:
    return {
        "name": row.name,
        "parameters": row.parameters,
        "peak_reserved": row.peak,
        "fits": row.fits,
        "fits_as_written": row.fits_as_written,
        "largest_batch_size": row.largest_batch_size,
        "plan": None if row.plan is None else as_dict(row.plan),
        "error": row.error or None,
    }


def _report(answer: Variants, *, unicode: bool) -> Group:
    chosen = answer.chosen
    style = "bold green" if chosen is not None else "bold red"
    verdict = Text(answer.explain().splitlines()[0], style=style)
    return Group(verdict, _table(answer, unicode=unicode), Text(f"Budget: {answer.budget.explain()}", style="dim"))


def _table(answer: Variants, *, unicode: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, pad_edge=False)
    planned = any(row.fits and not row.fits_as_written for row in answer.rows)
    titles = ("parameters", "as written", "of budget", "largest batch", *(("step time",) if planned else ()))
    table.add_column("variant", overflow="fold", min_width=min(24, max(len(row.name) + 2 for row in answer.rows)))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(f"batch of {answer.batch_size}", overflow="fold")
    chosen = answer.chosen
    for row in answer.rows:
        style = "bold" if row is chosen else "" if row.fits else "dim"
        mark = " *" if row is chosen else ""
        table.add_row(Text(row.name + mark), *_figures(row)[: len(titles)], Text(row.verdict()), style=style)
    return table


def _figures(row: Variant) -> tuple[str, ...]:
    if row.plan is None or row.peak is None:
        return ("-",) * 5
    slowdown = row.plan.slowdown
    return (
        f"{row.parameters:,}",
        format_bytes(row.peak),
        f"{row.peak / row.plan.budget.usable:.0%}",
        str(row.largest_batch_size),
        f"x {slowdown:.2f}" if row.fits and slowdown is not None else "-",
    )


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "utf-8").lower().startswith(("utf-", "utf8"))
