"""Published rows of sharded trainings beside ours; fills in docs/lab/sharded.md.

    python -m benchmarks sharded [--only WORD ...] [--json FILE] [--out DIR]

With --only, nothing is written: the page shows all. The largest row, 70B over 256 GPUs, takes a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS, GIB, fill, machine
from benchmarks.harness.records import Results, Row, write
from benchmarks.sharded import rows

#: What the file of rows calls a reason why a row does not count -> the reason.
REASONS = {
    "older": "FSDP2 of before 27 June 2024 (pytorch pull request 129721): the inputs of reduce-scatters are taken from "
    "the stream that it took them from (without that: 4 to 7% too low); all else is today's PyTorch",
    "attention": "which attention and which nightly release the run had is not stated; cuDNN's and flash attention "
    "differ by 2 GiB",
    "norm": "which norm the model had is not stated: with the one in the settings file everything kept is larger than "
    "the figure",
    "compiled": "measured with torch.compile and float8, predicted without",
}
MOMENTS = {"steady": "later steps", "first step": "first step"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict everything, print and write; the exit status is 1 where a row failed."""
    parser = arguments_of("sharded", __doc__, only="rows", json="every row")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    results = rows.predict(options.only, lambda line: print(line, flush=True))
    if any(row.judged for row in results.rows):
        count, median, worst = summary(results.rows)
        print(f"{count} rows with a fully published recipe: median error {median:.3%}, largest {worst:.2%}")
    if options.json:
        write(results, options.json)
    if not options.only and not results.failed:
        write_page(results, options.out)
    return int(bool(results.failed))


def summary(found: Sequence[Row]) -> tuple[int, float, float]:
    """Number of rows that count, and the median and the largest of their absolute errors."""
    errors = [abs(row.error) for row in found if row.judged]
    return len(errors), statistics.median(errors), max(errors)


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Fill in the page."""
    count, median, worst = summary(results.rows)
    fill(
        "sharded.md",
        {
            "machine": machine(results),
            "found": f"**{count} figures with a fully published recipe: median error {median:.3%}, "
            f"largest {worst:.2%}.**",
            "rows": [_line(row) for row in results.rows if row.judged],
            "others": [(*_line(row), REASONS[row.details["why"]]) for row in results.rows if not row.judged],
        },
        docs,
    )


def _line(row: Row) -> tuple[str, ...]:
    facts = row.details
    digits = max(2, len(facts["gib"].partition(".")[2]))
    stated = facts["allocator"] in rows.SETTINGS

    def answer(kind: str) -> str:
        text = f"{facts[kind] / GIB:.{digits}f} ({facts[kind] / (row.measured or 1) - 1:+.2%})"
        return f"**{text}**" if kind == (facts["allocator"] if stated else rows.UNPUBLISHED) else text

    return (
        row.name,
        f"{facts['measure']}, {MOMENTS[facts['moment']]}",
        facts["gib"],
        *map(answer, rows.SETTINGS),
        facts["allocator"] if stated else "not stated",
        facts["by"],
    )
