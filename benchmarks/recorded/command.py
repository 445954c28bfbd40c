"""Allocator histories that were recorded on GPUs: replayed, and predicted without a GPU.

    python -m benchmarks recorded [FILE ...] [--only WORD ...] [--json FILE] [--out DIR]

Without a FILE: the recordings in ``benchmarks/recorded/data``; where all are asked, docs/lab/recorded.md is filled in.
A FILE is a snapshot of your own (``torch.cuda.memory._dump_snapshot()``, also gzipped): it is replayed, and nothing is
written. The exit status is 1 where a replay differs from its recording, 2 for a file that cannot be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import DOCS, fill, machine
from benchmarks.harness.records import Results, Row, write
from benchmarks.recorded import recordings
from benchmarks.recorded.predictions import RUNS, predicted
from vram_guard.errors import InvalidInputError


def main(arguments: list[str] | None = None) -> int:
    """Replay, predict, print, and write the page."""
    parser = arguments_of("recorded", __doc__, only="recordings", json="everything")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="snapshots to replay, instead of our own")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    names = [] if options.files else chosen(recordings.names(), options.only)
    results = Results(environment=environment())
    try:
        for path in options.files:
            results.rows += recordings.replayed(path, path.name, "given")
    except InvalidInputError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    for name in names:
        results.rows += recordings.replayed(recordings.path_of(name), name, recordings.source_of(name))
    results.rows += [predicted(name) for name in RUNS if name in names]
    if options.json:
        write(results, options.json)
    for row in results.rows:
        print(" | ".join(_prediction(row) if is_prediction(row) else _replay(row)), row.details.get("difference", ""))
    if names == recordings.names():
        write_page(results, options.out)
    return int(not all(row.details["same_segments"] for row in results.rows if not is_prediction(row)))


def is_prediction(row: Row) -> bool:
    """True for a row that was predicted from a model, False for a replayed history."""
    return "in_order" in row.details


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Fill in the page."""
    predictions = [row for row in results.rows if is_prediction(row)]
    equal = sum(row.predicted == row.measured for row in predictions)
    fill(
        "recorded.md",
        {
            "machine": machine(results),
            "predictions": [_prediction(row) for row in predictions],
            "found": f"{equal} of {len(predictions)} peaks are equal to the byte.",
            "replays": [_replay(row) for row in results.rows if not is_prediction(row)],
        },
        docs,
    )


def _prediction(row: Row) -> tuple[str, ...]:
    facts, recorded = row.details, row.measured or 0
    return (
        row.name,
        f"{recorded:,}",
        _compared(row.predicted, recorded),
        _compared(facts["predicted_allocated"], facts["allocated"]),
        f"{facts['in_order']:.2%}",
    )


def _compared(size: int | None, recorded: int) -> str:
    size = size or 0
    return "equal" if size == recorded else f"{size:,} ({size / recorded - 1:+.3%})"


def _replay(row: Row) -> tuple[str, ...]:
    facts = row.details
    return (
        row.name,
        str(facts["device"]),
        f"{facts['actions']:,}",
        f"{facts['segments']:,}",
        f"{row.measured:,}",
        _compared(row.predicted, row.measured or 0),
        "yes" if facts["same_segments"] else "no",
        "yes" if facts["same_addresses"] else "no",
    )
