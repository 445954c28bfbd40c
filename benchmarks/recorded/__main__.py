"""Allocator histories that were recorded on GPUs: replayed, and predicted without a GPU.

    python -m benchmarks.recorded [FILE ...] [--only WORD ...] [--json FILE] [--out DIR]

Without a FILE: the recordings in ``benchmarks/recorded/data``, and the pages DIR/en/recorded.md and
DIR/zh_cn/recorded.md (DIR is the repository's ``docs`` unless told otherwise). A FILE is a snapshot of your own
(``torch.cuda.memory._dump_snapshot()``, also gzipped): it is replayed, and nothing is written. The exit status is 1
where a replay differs from its recording, 2 for a file that cannot be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import DOCS
from benchmarks.harness.records import Results, Row, write
from benchmarks.recorded import recordings
from benchmarks.recorded.pages import is_prediction, write_pages
from benchmarks.recorded.predictions import RUNS, predicted, with_programs
from benchmarks.recorded.replays import replayed
from vram_guard.errors import InvalidInputError


def main(arguments: list[str] | None = None) -> int:
    """Replay, predict, print, and write the pages."""
    parser = arguments_of("benchmarks.recorded", __doc__, only="recordings", json="everything")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="snapshots to replay, instead of our own")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    names = [] if options.files else chosen(recordings.names(), options.only)
    if not options.files and not names:
        print(f"no recording contains {' or '.join(options.only)}", file=sys.stderr)
        return 2
    results = Results(environment=environment())
    try:
        for path in options.files:
            results.rows += replayed(path, path.name, "given")
    except InvalidInputError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    for name in names:
        results.rows += replayed(recordings.path_of(name), name, recordings.source_of(name))
    results.rows += with_programs([predicted(name) for name in RUNS if name in names])
    if options.json:
        write(results, options.json)
    print_tables(results)
    if names and not options.only:
        for page in write_pages(results, options.out):
            print(page)
    return int(not all(row.details["same_segments"] for row in results.rows if not is_prediction(row)))


def print_tables(results: Results) -> None:
    """The replays, and then the predictions."""
    print(f"{'replayed':32}{'device':>7}{'actions':>9}{'segments':>10}{'peak reserved':>16}{'simulated':>16}  alike")
    for row in results.rows:
        if not is_prediction(row):
            print(_replay(row))
    print(
        f"\n{'predicted':28}{'recorded':>16}{'trace':>16}{'error':>10}{'program':>16}{'allocated':>11}{'in order':>10}"
    )
    for row in results.rows:
        if is_prediction(row):
            print(_prediction(row))


def _replay(row: Row) -> str:
    facts = row.details
    alike = "addresses" if facts["same_addresses"] else "segments" if facts["same_segments"] else "NOT"
    numbers = f"{facts['device']:>7}{facts['actions']:>9}{facts['segments']:>10}{row.measured:>16}{row.predicted:>16}"
    return f"{row.name:32}{numbers}  {alike} {facts['difference']}".rstrip()


def _prediction(row: Row) -> str:
    facts = row.details
    allocated = facts["predicted_allocated"] / facts["allocated"] - 1
    program = facts["program"] or "-"
    sizes = f"{row.measured:>16}{row.predicted:>16}{row.error:>+10.3%}{program:>16}"
    return f"{row.name:28}{sizes}{allocated:>+11.4%}{facts['in_order']:>10.3%}"


if __name__ == "__main__":
    raise SystemExit(main())
