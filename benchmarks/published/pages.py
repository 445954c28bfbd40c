"""The tables of docs/lab/accuracy.md, from rows that were predicted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.pages import fill
from benchmarks.harness.records import Results, Row
from benchmarks.harness.statistics import OURS, Errors, lines

NAMES = {"xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
Groups = Sequence[Sequence[Row]]
Cells = Iterator[tuple[str, ...]]


def show(results: Results, docs: Path | None) -> None:
    """Print each table whose rows are all there, what could not be reproduced and why, and what failed.

    Args:
        results: the rows.
        docs: the folder of the documentation, whose tables are filled in; None: only print.
    """
    rows = dict(results.by_source())
    tables = {
        name: list(make([rows[each] for each in sources]))
        for name, (sources, make) in TABLES.items()
        if rows.keys() >= set(sources)
    }
    for name, cells in tables.items():
        print(f"\n{name}", *(" | ".join(each) for each in cells), sep="\n")
    for name, reason in results.not_reproduced.items():
        print(f"not reproduced: {name}: {reason}")
    for name, traceback in results.failed.items():
        print(f"FAILED: {name}\n{traceback}")
    if docs is not None and tables:
        today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
        fill("accuracy.md", tables, docs, f"Made on {today}.")


def _judged(rows: Sequence[Row]) -> list[float]:
    return [row.error for row in rows if row.has_peak]


def _percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) < 0.01 else f"{share:.1%}"


def _errors(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "-"
    return _percent(errors.median), _percent(errors.p90), f"{errors.bias:+.2%}"


def _tools(groups: Groups) -> Cells:
    for line in lines([row for rows in groups for row in rows]):
        name, there = NAMES.get(line.tool, line.tool), line.ours_there
        if line.tool == OURS:
            name = f"**{name}**"
        elif there is not None:
            median, p90 = _percent(there.median), _percent(there.p90)
            name = f"{name} ({line.rows} rows; ours there {median}, {p90})"
        wrong = f"{line.wrong}/{line.verdicts}" if line.verdicts else "-"
        yield (name, *_errors(line.errors), wrong, "-" if line.seconds is None else f"{line.seconds:.1f}")


def _parts(groups: Groups) -> Cells:
    for name, rows in zip(("transformers", "CNNs"), groups, strict=True):
        there = Errors.of([row.error_of(row.tools["xmem"]) for row in rows if row.has_peak and "xmem" in row.tools])
        other = "-" if there is None else f"{_percent(there.median)}, {_percent(there.p90)}"
        inside = [(row.measured or 0) <= row.upper for row in rows if row.has_peak and row.upper is not None]
        covered = f"{sum(inside)}/{len(inside)}" if inside else "-"
        yield (name, str(len(_judged(rows))), *_errors(Errors.of(_judged(rows))), other, covered)


def _operators(groups: Groups) -> Cells:
    errors = _judged(groups[0])
    found = Errors.of(errors)
    if found is not None:
        near = sum(abs(error) <= 0.0005 for error in errors)
        yield str(len(errors)), f"{found.median:.3%}", f"{found.p90:.3%}", str(near), f"{min(errors):+.0%}"


def _verdicts(groups: Groups) -> Cells:
    names = ("those in which the causes below were sought", "**others, not examined before that**")
    for name, rows in zip(names, groups, strict=True):
        ran, failed = ([bool(row.right_verdict) for row in rows if row.ran is kind] for kind in (True, False))
        whole = len(ran) + len(failed)
        counts = (f"{sum(each)}/{len(each)}" for each in (ran, failed))
        yield (name, str(whole), f"{(sum(ran) + sum(failed)) / whole:.1%}", *counts)


_XMEM = ("xMem's runs, transformers", "xMem's runs, CNNs")

#: Table -> the sources whose rows it shows, and what makes it; it is made only where all of them are there.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Groups], Cells]]] = {
    "tools": (_XMEM, _tools),
    "parts": (_XMEM, _parts),
    "liger": (("Liger-Kernel's operators",), _operators),
    "timm": (("timm on a 24 GB card", "timm on a 24 GB card, kept aside"), _verdicts),
}
