"""Published rows of sharded trainings beside ours; fills in docs/lab/sharded.md.

    python -m benchmarks sharded [--only WORD ...] [--json FILE] [--out DIR]

``data/rows.csv`` has a line for each published figure: "reserved" is ``max_memory_reserved``, "active" the peak of
active bytes; "first step" is what the log says after the first step, "steady" after a later one. Predicted are those of
:data:`TRAININGS`; what was predicted of the others stands on the page. Each training is traced once, and shown with
both kinds of segments. With --only, nothing is written: the page shows all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness.command import arguments_of
from benchmarks.harness.pages import DOCS, GIB, fill, machine
from benchmarks.harness.records import Results, Row, write
from benchmarks.published.source import Record, Source, records_of, run
from benchmarks.sharded.torchtitan import Recipe, flash_attention
from vram_guard import AllocatorSettings, Timeline
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at

DATA = Path(__file__).parent / "data" / "rows.csv"
CARD = "H100 SXM"

#: Both kinds of segments, by the name that the file has for them.
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}

#: Where nobody says which segments a run had, its prediction is the one with PyTorch's defaults.
UNPUBLISHED = "default"
MOMENTS = {"steady": "later steps", "first step": "first step"}

_GROUPS: dict[str, Any] = {"norm": "native", "optimizer": "fused", "groups": True}

#: The trainings whose recipe is published as a whole and is today's, by their names in the file.
TRAININGS = {
    "8b-8": Recipe(),
    "8b-8-always": Recipe(reshard="always"),
    "8b-8-never": Recipe(reshard="never"),
    "8b-8-fused": Recipe(optimizer="fused"),
    "8b-8-chunked": Recipe(optimizer="fused", chunked=True),
    "8b-8-late-norm": Recipe(optimizer="fused", norm="late"),
    "8b-8-groups": Recipe(**_GROUPS),
    "8b-8-two": Recipe(batch=2),
    "8b-128-two": Recipe(gpus=128, batch=2),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict everything, print and write; the exit status is 1 where a row failed."""
    parser = arguments_of("sharded", __doc__, only="trainings", json="every row")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args(arguments)
    results = run(SOURCE, options.only, lambda line: print(line, flush=True))
    if results.rows:
        print(summary(results.rows))
    for name, traceback in results.failed.items():
        print(f"FAILED: {name}\n{traceback}")
    if options.json:
        write(results, options.json)
    if not options.only and not results.failed:
        write_page(results, options.out)
    return int(bool(results.failed))


def until_second_step(timeline: Timeline) -> Timeline:
    """The first step alone, with what precedes it."""
    start = next(phase.start for phase in timeline.phases if phase.step == 2)
    phases = tuple(phase for phase in timeline.phases if phase.step < 2)
    return replace(timeline, events=timeline.events[:start], phases=phases, deferred=())


def rows() -> list[list[Record]]:
    """The figures of each training."""
    of_trainings = [row for row in records_of(DATA) if row["recipe"] in TRAININGS and row["judged"] == "yes"]
    return [list(rows) for _recipe, rows in groupby(of_trainings, lambda row: row["recipe"])]


def name(records: Sequence[Record]) -> str:
    """A training and all who published a figure of it."""
    return ", ".join([records[0]["name"], *dict.fromkeys(row["source"] for row in records)])


def predict(records: Sequence[Record]) -> list[Row]:
    """The figures of one training."""
    gpu, recipe = find_gpu(CARD), TRAININGS[records[0]["recipe"]]
    start = time.perf_counter()
    with flash_attention():
        timeline = trace_at(recipe.step(), recipe.batch, compute_capability=gpu.compute_capability)
    timeline = timeline.on(gpu.multiprocessors, gpu.placement)
    seconds = time.perf_counter() - start
    parts = {"steady": timeline, "first step": until_second_step(timeline)}
    return [_row(record, parts[record["moment"]], recipe.batch, seconds) for record in records]


def _row(record: Record, timeline: Timeline, batch: int, seconds: float) -> Row:
    measure = record["measure"]
    at = {kind: timeline.at(batch, settings=settings) for kind, settings in SETTINGS.items()}
    both = {kind: one.peak_reserved if measure == "reserved" else one.peak_allocated for kind, one in at.items()}
    kind = record["allocator"] if record["allocator"] in SETTINGS else UNPUBLISHED
    return Row(
        source=SOURCE.title,
        name=record["name"],
        measured=round(float(record["gib"]) * GIB),
        predicted=both[kind],
        tier=timeline.tier,
        seconds=seconds,
        network=timeline.network,
        upper=(measure == "reserved" and at[kind].peak_upper) or None,
        details={
            "by": record["source"],
            "recipe": record["recipe"],
            "measure": measure,
            "moment": record["moment"],
            "allocator": record["allocator"],
            "gib": record["gib"],
            **both,
        },
    )


SOURCE = Source("sharded trainings", rows, name, predict)


def summary(found: Sequence[Row]) -> str:
    """The number of figures, and the median and the largest of their absolute errors."""
    errors = [abs(row.error) for row in found]
    return f"{len(errors)} figures: median error {statistics.median(errors):.3%}, largest {max(errors):.2%}."


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Fill in the page."""
    found = {"machine": machine(results), "found": f"**{summary(results.rows)}**"}
    fill("sharded.md", {**found, "rows": [_line(row) for row in results.rows]}, docs)


def _line(row: Row) -> tuple[str, ...]:
    facts = row.details
    digits = max(2, len(facts["gib"].partition(".")[2]))
    stated = facts["allocator"] in SETTINGS

    def answer(kind: str) -> str:
        text = f"{facts[kind] / GIB:.{digits}f} ({facts[kind] / (row.measured or 1) - 1:+.2%})"
        return f"**{text}**" if kind == (facts["allocator"] if stated else UNPUBLISHED) else text

    return (
        row.name,
        f"{facts['measure']}, {MOMENTS[facts['moment']]}",
        facts["gib"],
        *map(answer, SETTINGS),
        facts["allocator"] if stated else "not stated",
        facts["by"],
    )
