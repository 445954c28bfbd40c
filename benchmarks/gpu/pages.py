"""The pages docs/en/measured.md and docs/zh_cn/measured.md, made from what was measured on GPUs and its predictions.

    python -m benchmarks.gpu.pages FILE

FILE is what ``python -m benchmarks.gpu.compare --json FILE`` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.guarded.__main__ import FOLDER as GUARDED
from benchmarks.gpu.table import allocated_error
from benchmarks.harness import pages, records
from benchmarks.harness.pages import Texts
from benchmarks.harness.records import Results, Row
from benchmarks.harness.statistics import Errors

TEXTS = pages.texts(Path(__file__).parent)
GROUPS = ("steps", "techniques", "compiled", "ranks")
MIB = 2**20

T = TypeVar("T")


def write_pages(results: Results, guarded: list[dict[str, Any]], docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages("measured.md", TEXTS, lambda words: page(results, guarded, words), docs)


def page(results: Results, guarded: list[dict[str, Any]], words: Texts) -> str:
    """One page. A training that was measured on several GPUs has a row for each of them, one below the other."""
    rows = [row for row in _one_below_the_other(results.rows, lambda row: row.name) if row.has_peak]
    gpus = words["and"].join(dict.fromkeys(_gpu_of(row) for row in results.rows))
    intro = words["intro"].format(**{**results.environment, "gpu": gpus}, count=len(rows))
    parts = [words["title"], intro, words["summary"], _summary(rows, words)]
    histories = [row.details["history"] for row in results.rows if "history" in row.details]
    same = sum(one["same_segments"] for one in histories)
    parts.append(words["histories"].format(same=same, count=len(histories)))
    for group in GROUPS:
        chosen = [row for row in rows if row.details["group"] == group]
        if chosen:
            parts += [words[group], pages.table(words["columns"], map(_told, chosen))]
    if guarded:
        parts += [words["guarded"], pages.table(words["guarded_columns"], _guarded(guarded, words))]
    measured = {row.name for row in results.rows}
    left = [name for name in results.not_reproduced if name not in measured]
    if left:
        names = ", ".join(f"`{name}`" for name in left)
        parts.append(words["left_out"].format(count=len(left), names=names))
    return "\n\n".join([*parts, words["why"]]) + "\n"


def _one_below_the_other(items: list[T], key: Callable[[T], Hashable]) -> list[T]:
    """Those of one key together, the keys as they first appear."""
    order = {found: place for place, found in enumerate(dict.fromkeys(map(key, items)))}
    return sorted(items, key=lambda one: order[key(one)])


def _gpu_of(row: Row) -> str:
    return row.source.partition(",")[0]


def _summary(rows: list[Row], words: Texts) -> str:
    def line(title: str, chosen: list[Row]) -> tuple[str, ...]:
        sizes = Errors.of([allocated_error(row) for row in chosen]), Errors.of([row.error for row in chosen])
        told = [f"{one.median:.2%}, {one.p90:.1%}" for one in sizes if one is not None]
        low = min((row.error for row in chosen), default=0.0)
        return title, str(len(chosen)), *told, f"{low:+.1%}"

    kinds = {network: [row for row in rows if row.network == network] for network in sorted({r.network for r in rows})}
    groups = {group: [row for row in rows if row.details["group"] == group] for group in GROUPS}
    cards = {gpu: [row for row in rows if _gpu_of(row) == gpu] for gpu in dict.fromkeys(map(_gpu_of, rows))}
    lines = [line(words["all"], rows)]
    lines += [line(gpu, chosen) for gpu, chosen in cards.items()] if len(cards) > 1 else []
    lines += [line(words["names"][group], chosen) for group, chosen in groups.items() if chosen]
    lines += [line(words["names"][network], chosen) for network, chosen in kinds.items() if network in words["names"]]
    return pages.table(words["summary_columns"], lines)


def _told(row: Row) -> tuple[str, ...]:
    details = row.details
    return (
        f"`{row.name}`",
        str(details["batch_size"]),
        _card(_gpu_of(row)),
        f"{details['allocated'] / MIB:,.0f}",
        f"{allocated_error(row):+.2%}",
        f"{(row.measured or 0) / MIB:,.0f}",
        f"{row.error:+.2%}",
    )


def _guarded(runs: Iterable[dict[str, Any]], words: Texts) -> Iterator[tuple[str, ...]]:
    """The trainings that ended."""
    found = [(row, _card(run["environment"]["gpu"])) for run in runs for row in run["rows"] if "error" not in row]
    for row, card in _one_below_the_other(found, lambda one: (one[0]["name"], one[0]["budget"])):
        predicted, measured = row["predicted"][1], row["measured"][1]
        plan = row["plan"] or words["as_written"]
        sizes = f"{predicted / MIB:,.0f}", f"{measured / MIB:,.0f}", f"{predicted / measured - 1:+.2%}"
        yield row["name"], row["budget"], card, plan, *sizes


def _card(gpu: str) -> str:
    """A GPU's short name."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def main(arguments: list[str]) -> None:
    """Write both pages."""
    (source,) = arguments
    guarded = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GUARDED.glob("guarded*.json"))]
    for written in write_pages(records.read(Path(source)), guarded, pages.DOCS):
        print(f"wrote {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
