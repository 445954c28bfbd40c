"""The tables of docs/lab/measured.md: what was measured on GPUs, and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

from benchmarks.gpu.table import GROUPS, allocated_error, card_of, sums
from benchmarks.harness.pages import DOCS, MIB, fill
from benchmarks.harness.records import Results, Row

T = TypeVar("T")


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Fill in the page. A training that was measured on several GPUs has a row for each, one below the other."""
    rows = [row for row in _one_below_the_other(results.rows, lambda row: row.name) if row.has_peak]
    histories = [row.details["history"] for row in results.rows if "history" in row.details]
    same = sum(one["same_segments"] for one in histories)

    gpus = " and an ".join(dict.fromkeys(card_of(row) for row in results.rows))
    runs = (
        "{count} trainings of three and more optimizer steps ran on an {gpus} (torch {torch}, driver {driver}, "
        "Python {python}), each in a process of its own (`make gpu-measure`)."
    )
    fill(
        "measured.md",
        {
            "runs": runs.format(**results.environment, gpus=gpus, count=len(rows)),
            "histories": f"Of {len(histories)} recorded allocator histories, {same} were replayed segment by segment "
            "from their requests alone: what differs below lies in the requests.",
            "summary": sums(rows),
            **{group: [_told(row) for row in rows if row.details["group"] == group] for group in GROUPS},
        },
        docs,
    )


def _one_below_the_other(items: list[T], key: Callable[[T], Hashable]) -> list[T]:
    """Those of one key together, the keys as they first appear."""
    order = {found: place for place, found in enumerate(dict.fromkeys(map(key, items)))}
    return sorted(items, key=lambda one: order[key(one)])


def _told(row: Row) -> tuple[str, ...]:
    details = row.details
    return (
        f"`{row.name}`",
        str(details["batch_size"]),
        _card(card_of(row)),
        f"{details['allocated'] / MIB:,.0f}",
        f"{allocated_error(row):+.2%}",
        f"{(row.measured or 0) / MIB:,.0f}",
        f"{row.error:+.2%}",
    )


def _card(gpu: str) -> str:
    """A GPU's short name."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]
