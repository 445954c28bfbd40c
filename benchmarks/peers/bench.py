"""Ask every estimator about the same training steps, side by side, and write the table, the chart and the pages.

    python -m benchmarks.peers.bench [--out DIR] [--json FILE] [--only WORD ...] [--tools NAME ...]

Each question runs in a worker of its own (harness/workers.py), with a time limit. What a tool cannot answer, and why,
is part of the table. The pages go to DIR/en and DIR/zh_cn, the chart to DIR/images; DIR is the repository's ``docs``
unless told otherwise. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import DOCS, GIB
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.statistics import OURS
from benchmarks.harness.workers import ask
from benchmarks.peers.chart import draw
from benchmarks.peers.pages import by_workload, write_pages
from benchmarks.peers.tools import TOOLS, answer, row_of
from benchmarks.peers.workloads import workloads

#: Seconds for one question, of the wall clock: many times what they take on a machine without other work.
LIMIT = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where vram_guard itself had no answer."""
    parser = arguments_of("benchmarks.peers.bench", __doc__, only="workloads", json="everything")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    options = parser.parse_args(arguments)
    names = chosen(workloads(), options.only)
    if not names:
        print(f"no workload contains {' or '.join(options.only)}", file=sys.stderr)
        return 2
    results = ask_everything(names, options.tools)
    if options.json:
        write(results, options.json)
    print_table(results)
    draw(results, options.out / "images" / "peers.png")
    for page in write_pages(results, options.out):
        print(page)
    return int(any(row.predicted is None for row in results.rows if row.source == OURS))


def ask_everything(names: list[str], tools: list[str], limit: float = LIMIT) -> Results:
    """A row for each workload and tool; one worker at a time, so that the seconds are their own."""
    results = Results(environment=environment())
    for name in names:
        for tool in tools:
            heard = ask(answer, tool, name, limit=limit)
            step = workloads()[name]
            row = Row(**heard.result) if heard.result else row_of(tool, step, reason=_unanswered(heard.error))
            results.rows.append(row)
            said = f"{row.predicted / GIB:.2f} GiB" if row.predicted is not None else row.reason
            print(f"{name}, {tool}: {said}", file=sys.stderr, flush=True)
    return results


def _unanswered(error: str) -> str:
    return error.strip().splitlines()[-1]


def print_table(results: Results) -> None:
    """Predicted GiB, the error where a measurement is published, and the seconds it took."""
    for title, rows in by_workload(results).items():
        first = rows[0]
        measured = f"measured {first.measured / GIB:.2f} GiB on {first.details['gpu']}" if first.measured else ""
        print(f"\n{title}: {measured or 'not measured'}")
        for row in rows:
            if row.predicted is None:
                print(f"  {row.source:18}{'-':>9}            {'':>9}  {row.reason}")
                continue
            error = f"{row.error:+9.1%}" if row.measured else f"{'':>9}"
            print(f"  {row.source:18}{row.predicted / GIB:>9.2f} GiB{error}{row.seconds:>10.2f} s")


if __name__ == "__main__":
    raise SystemExit(main())
