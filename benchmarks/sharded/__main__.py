"""Published rows of sharded trainings beside ours; the page, and the pictures of "One model, N GPUs".

    python -m benchmarks.sharded [--only WORD ...] [--scales] [--json FILE] [--out DIR]

Prints the rows, the median and the largest error, and writes DIR/en/sharded.md and DIR/zh_cn/sharded.md with pictures
in DIR/images (DIR is the repository's ``docs`` unless told otherwise). With --only, nothing is written: the page shows
all. With --scales, only the tables of 8B to 405B are made, and written into the pages that are there. It takes no GPU;
the largest row, 70B over 256 GPUs, takes a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.checked import write_json
from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS
from benchmarks.harness.records import write
from benchmarks.sharded import mem_tracker, picture, rows, scales
from benchmarks.sharded.pages import renew_scales, summary, write_pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict everything, print and write; the exit status is 1 where a row failed."""
    parser = arguments_of("python -m benchmarks.sharded", __doc__, only="rows", json="every row")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    parser.add_argument("--scales", action="store_true", help="only the tables of 8B to 405B")
    options = parser.parse_args(arguments)
    if options.scales:
        for path in renew_scales({"scales": scales.every(), "plans": scales.planned()}, options.out):
            print(path)
        return 0
    results = rows.predict(options.only, lambda line: print(line, flush=True))
    if any(row.judged for row in results.rows):
        count, median, worst = summary(results.rows)
        print(f"{count} rows with a fully published recipe: median error {median:.3%}, largest {worst:.2%}")
    if options.json:
        write(results, options.json)
    if not options.only:
        figures = {"layouts": picture.figures(), "scales": scales.every(), "tools": mem_tracker.both()}
        figures["plans"] = scales.planned()
        if options.json:
            write_json(options.json.with_suffix(".figures.json"), figures)
        for path in write_pages(results, figures, options.out):
            print(path)
    return int(bool(results.failed))


if __name__ == "__main__":
    raise SystemExit(main())
