"""The pages docs/en/plans.md and docs/zh_cn/plans.md, made from results whose sources are the trainings."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import pages
from benchmarks.harness.pages import GIB, Texts
from benchmarks.harness.records import Results, Row
from benchmarks.plans.compare import HOST_BUDGET

TEXTS = pages.texts(Path(__file__).parent)


def write_pages(results: Results, docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages("plans.md", TEXTS, lambda words: page(results, words), docs)


def page(results: Results, words: Texts) -> str:
    """One page."""
    parts = [
        words["title"],
        words["made_by"].format(machine=pages.machine(results), gpu=results.environment["planned_for"]),
        words["intro"].format(host=HOST_BUDGET.replace("GiB", " GiB")),
    ]
    for title, rows in results.by_source():
        parts += [
            f"## {title}",
            words["as_written"].format(peak=rows[0].details["as_written"] / GIB),
            pages.table(words["columns"], [_line(row, words) for row in rows]),
        ]
    parts += [words["failed"].format(name=name, why=why) for name, why in results.failed.items()]
    return "\n\n".join(parts) + "\n"


def _line(row: Row, words: Texts) -> tuple[str, ...]:
    facts = row.details
    half, size, slowdown = facts["halving"], facts["batch_size"], facts["slowdown"]
    plan = (facts["plan"] if facts["changed"] else words["unchanged"]) if row.fits else words["nothing_fits"]
    batch, time = words["halving_fails"], "-"
    if half is not None:
        kept = half["batch_size"] == size
        batch = words["kept"].format(size=size) if kept else f"{size} → {half['batch_size']}"
        time = f"× {half['slowdown']:.2f}"
    return (
        row.name.replace("GiB", " GiB"),
        plan,
        f"{(row.predicted or 0) / GIB:.2f} GiB" if row.fits else "-",
        f"× {slowdown:.2f}" if row.fits and slowdown is not None else "-",
        f"{facts['host_peak'] / GIB:.2f} GiB" if row.fits and facts["host_peak"] else "-",
        batch,
        time,
        words["seconds"].format(seconds=facts["processor"]),
        str(facts["traces"]),
    )
