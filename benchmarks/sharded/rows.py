"""Published rows of sharded trainings, each predicted with both kinds of segments.

``data/rows.csv`` has a line for each published figure: "reserved" is ``max_memory_reserved``, "active" the peak of
active bytes; "first step" is what the log says after the first step, "steady" after a later one.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.command import is_chosen
from benchmarks.harness.environment import environment, libraries
from benchmarks.harness.records import Results, Row
from benchmarks.published.source import records_of
from benchmarks.sharded.qwen import qwen
from benchmarks.sharded.torchtitan import Recipe, flash_attention
from vram_guard import AllocatorSettings, Estimate, Timeline, TrainingStep
from vram_guard.budget.catalogue import find_gpu
from vram_guard.simulate import trace_at

GIB = 2**30
DATA = Path(__file__).parent / "data" / "rows.csv"

#: Both kinds of segments, by the name that the file has for them.
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}

#: Where nobody says which segments a run had, its prediction is the one with PyTorch's defaults.
UNPUBLISHED = "default"


class Training(NamedTuple):
    """What several rows are figures of."""

    step: TrainingStep
    batch: int
    card: str = "H100 SXM"
    attention: Callable[[], contextlib.AbstractContextManager[None]] = flash_attention


def _titan(card: str = "H100 SXM", **facts: Any) -> Callable[[], Training]:
    recipe = Recipe(**facts)
    return lambda: Training(recipe.step(), recipe.batch, card)


_8B: dict[str, Any] = {"model": "8B", "gpus": 8, "batch": 1}
_GROUPS: dict[str, Any] = {**_8B, "norm": "native", "optimizer": "fused", "groups": True}
_7B: dict[str, Any] = {
    "model": "Llama-2-7B",
    "gpus": 8,
    "batch": 8,
    "length": 2048,
    "positions": 2 * 32_768,
    "loss": "kept",
    "wide": True,
    "older": True,
}

TRAININGS: dict[str, Callable[[], Training]] = {
    "8b-8": _titan(**_8B),
    "8b-8-always": _titan(**_8B, reshard="always"),
    "8b-8-never": _titan(**_8B, reshard="never"),
    "8b-8-fused": _titan(**_8B, optimizer="fused"),
    "8b-8-chunked": _titan(**_8B, optimizer="fused", loss="chunked"),
    "8b-8-late-norm": _titan(**_8B, optimizer="fused", norm="late"),
    "8b-8-groups": _titan(**_GROUPS),
    "8b-64-groups": _titan(**{**_GROUPS, "gpus": 64}),
    "8b-tp2-groups": _titan(**_GROUPS, tensor=2),
    "8b-8-two": _titan(**{**_8B, "batch": 2}),
    "8b-128-two": _titan(model="8B", gpus=128, batch=2),
    "8b-8-none": _titan(**_8B, checkpointing="none", wide=True),
    "8b-8-long": _titan(**_8B, length=32_768, checkpointing="full"),
    "8b-8-a100": _titan("A100 SXM4 80GB", **_8B, loss="kept", wide=True, older=True),
    "8b-tp4": _titan("A100 SXM4 80GB", model="8B", gpus=8, batch=4, tensor=4, wide=True, older=True),
    "70b-tp8": _titan(model="70B", gpus=256, batch=16, tensor=8, checkpointing="full"),
    "7b-8": _titan(**_7B),
    "7b-8-full": _titan(**_7B, checkpointing="full"),
    "qwen": lambda: Training(qwen(), 2, attention=contextlib.nullcontext),
}

Record = dict[str, str]


def all_rows() -> list[Record]:
    """Every line of the file."""
    return records_of(DATA)


def until_second_step(timeline: Timeline) -> Timeline:
    """The first step alone, with what precedes it."""
    start = next(phase.start for phase in timeline.phases if phase.step == 2)
    phases = tuple(phase for phase in timeline.phases if phase.step < 2)
    return replace(timeline, events=timeline.events[:start], phases=phases, deferred=())


def figure(estimate: Estimate, measure: str) -> int:
    """The bytes that the row is about."""
    return estimate.peak_reserved if measure == "reserved" else estimate.peak_allocated


def predict(only: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> Results:
    """Every row that can be followed; each training is traced once."""
    chosen = [row for row in all_rows() if is_chosen(f"{row['name']} {row['source']} {row['recipe']}", only)]
    found = Results(made_with={TITLE: libraries()}, environment=environment())
    made: dict[str, Row] = {}
    for recipe in dict.fromkeys(row["recipe"] for row in chosen):
        mine = [row for row in chosen if row["recipe"] == recipe]
        try:
            for record, row in zip(mine, _predicted(TRAININGS[recipe](), mine), strict=True):
                made[_key(record)] = row
                tell(told(row))
        except Exception:  # noqa: BLE001 - one training must not stop the others
            found.failed[recipe] = traceback.format_exc()
            tell(f"{recipe} FAILED\n{traceback.format_exc()}")
    found.rows = [made[_key(row)] for row in chosen if _key(row) in made]
    return found


def _key(record: Record) -> str:
    return "|".join(record[name] for name in ("source", "recipe", "measure", "moment"))


def _predicted(training: Training, records: Sequence[Record]) -> list[Row]:
    gpu = find_gpu(training.card)
    start = time.perf_counter()
    with training.attention():
        timeline = trace_at(
            training.step,
            training.batch,
            compute_capability=gpu.compute_capability,
            multiprocessors=gpu.multiprocessors,
            placement=gpu.placement,
        )
    seconds = time.perf_counter() - start
    parts = {"steady": timeline, "first step": until_second_step(timeline)}
    at = {
        (moment, kind): part.at(training.batch, settings=settings)
        for moment, part in parts.items()
        for kind, settings in SETTINGS.items()
    }
    return [_row(record, timeline, at, seconds) for record in records]


def _row(record: Record, timeline: Timeline, at: dict[tuple[str, str], Estimate], seconds: float) -> Row:
    moment, measure = record["moment"], record["measure"]
    both = {kind: figure(at[moment, kind], measure) for kind in SETTINGS}
    kind = record["allocator"] if record["allocator"] in SETTINGS else UNPUBLISHED
    estimate = at[moment, kind]
    upper = estimate.peak_upper if measure == "reserved" else 0
    return Row(
        source=TITLE,
        name=record["name"],
        measured=round(float(record["gib"]) * GIB),
        predicted=both[kind],
        tier=timeline.tier,
        seconds=seconds,
        judged=record["judged"] == "yes",
        network=timeline.network,
        upper=upper or None,
        details={
            "by": record["source"],
            "recipe": record["recipe"],
            "measure": measure,
            "moment": moment,
            "allocator": record["allocator"],
            "why": record["why"],
            "gib": record["gib"],
            **both,
        },
    )


def told(row: Row) -> str:
    """One line for a row."""
    facts = row.details
    both = "  ".join(f"{kind} {facts[kind] / GIB:7.3f}" for kind in SETTINGS)
    kept = "" if row.judged else f"  ({facts['why']})"
    what = f"{facts['measure']} {facts['moment']}"
    return f"{row.name[:52]:52} {what:20} {facts['gib']:>9} {both}  {facts['allocator']:11} {row.error:+8.3%}{kept}"


TITLE = "sharded trainings"
