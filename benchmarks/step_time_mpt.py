"""Published throughputs of MPT held against the cost model: how many pairs it ranks right. Nothing is fitted to them.

llm-foundry published tokens a second of each GPU for MPT models on 8 A100 or H100 of 80 GB, sharded, in bfloat16
(``scripts/train/benchmarking/README.md`` and ``larger_mb_1.md`` of github.com/mosaicml/llm-foundry): sequences of 512
to 65,536 tokens, micro-batches of 1 to 128 samples, with and without checkpointing. Rows of one model on one card are
compared in pairs. The step is traced as FSDP2 spreads it, with NVLink between the cards.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.networks.mpt import SIZES, Mpt
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import step_of
from vram_guard import Parallel, TrainingStep
from vram_guard.budget.catalogue import find_gpu
from vram_guard.parallel.links import topology
from vram_guard.plan.communication import communication
from vram_guard.plan.step_time import step_seconds
from vram_guard.simulate import trace_at
from vram_guard.techniques.recipe import Recipe

DATA = Path(__file__).parent / "published" / "data" / "mpt_throughput.csv"
GPUS = 8
CARDS = {"a100_80gb": "A100 SXM4 80GB", "h100_80gb": "H100 SXM"}
#: Pairs whose measured throughputs differ by less are shown apart: no roofline can know such differences.
NEAR = 0.1


@dataclass(frozen=True)
class Row:
    """One published run."""

    model: str
    card: str
    length: int
    micro_batch: int
    micro_batches: int
    checkpointing: bool
    measured: float
    """Tokens a second of a GPU."""
    predicted: float = 0.0

    @property
    def name(self) -> str:
        """What tells the run from others of the model on the card."""
        again = ", checkpointing" if self.checkpointing else ""
        return f"{self.length} tokens, {self.micro_batches} micro-batches of {self.micro_batch}{again}"

    def step(self) -> TrainingStep:
        """The step of one rank."""
        sizes, length = SIZES[self.model], self.length
        blocks = tuple(f"blocks.{number}" for number in range(sizes.layers)) if self.checkpointing else ()
        return step_of(lambda: Mpt(sizes, length), _tokens(length), _loss, lr=1e-4, foreach=True).with_(
            precision="bf16-mixed",
            clip_grad_norm=1.0,
            accumulate=min(2, self.micro_batches),
            recipe=Recipe(checkpoint=blocks),
            parallel=Parallel(gpus=GPUS, kind="fsdp2", param_dtype="bfloat16", reduce_dtype="bfloat16"),
        )


def _tokens(length: int) -> Any:
    return lambda samples: torch.zeros(samples, length, dtype=torch.long)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens)
    return loss


def published() -> list[Row]:
    """Every row, those of one model on one card together."""
    with DATA.open(newline="") as file:
        return [
            Row(
                one["model"],
                one["card"],
                *(int(one[name]) for name in ("length", "micro_batch", "micro_batches")),
                one["checkpointing"] == "1",
                float(one["tokens_per_second"]),
            )
            for one in csv.DictReader(file)
        ]


def predicted(row: Row) -> float:
    """In a worker: the cost model's tokens a second of a GPU."""
    card = find_gpu(CARDS[row.card])
    timeline = trace_at(row.step(), row.micro_batch, compute_capability=card.compute_capability)
    wires = topology(None, gpus=GPUS, node=GPUS, gpu=card)
    waited = communication(timeline, row.micro_batch, card, wires, micro_batches=row.micro_batches)
    time = step_seconds(timeline, row.micro_batch, card, micro_batches=row.micro_batches) + waited.step_time
    return row.length * row.micro_batch * row.micro_batches / time.seconds


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows of one model on one card that were measured at different speeds."""
    return ((one, other) for one, other in combinations(rows, 2) if one.measured != other.measured)


def ranked_right(one: Row, other: Row) -> bool:
    """True if the model puts two rows in the order in which they were measured."""
    return (one.measured < other.measured) == (one.predicted < other.predicted)


def is_near(one: Row, other: Row) -> bool:
    """True if two rows were measured at nearly the same speed."""
    return abs(one.measured - other.measured) < NEAR * max(one.measured, other.measured)


def main() -> None:
    """Print every row, and the share of pairs that are ranked right."""
    options = arguments_of("step_time_mpt.py", __doc__, only="models").parse_args()
    names = chosen(tuple(SIZES), options.only)
    counted: list[tuple[Row, Row]] = []
    for (model, card), group in groupby(published(), lambda row: (row.model, row.card)):
        if model not in names:
            continue
        rows = [Row(**{**vars(row), "predicted": ask(predicted, row, limit=None).checked()}) for row in group]
        print(f"\nMPT-{model}, {GPUS} x {CARDS[card]}")
        for row in rows:
            print(f"  {row.name:<52}{row.measured:>9.0f}{row.predicted:>9.0f}{row.predicted / row.measured:>7.2f}")
        found = list(pairs(rows))
        wrong = [pair for pair in found if not ranked_right(*pair)]
        print(f"  pairs ranked right: {len(found) - len(wrong)} of {len(found)}", flush=True)
        for one, other in wrong:
            print(f"    wrong: {one.name} ({one.measured:.0f}) and {other.name} ({other.measured:.0f})")
        counted += found
    for title, chosen_pairs in (
        ("all pairs", counted),
        (f"measured at least {NEAR:.0%} apart", [pair for pair in counted if not is_near(*pair)]),
        (
            "with and without checkpointing",
            [(one, other) for one, other in counted if one.checkpointing != other.checkpointing],
        ),
        ("of equal length", [(one, other) for one, other in counted if one.length == other.length]),
    ):
        right = sum(ranked_right(*pair) for pair in chosen_pairs)
        print(f"{title}: {right} of {len(chosen_pairs)} ranked right ({right / max(1, len(chosen_pairs)):.1%})")


if __name__ == "__main__":
    main()
