"""Predict the training memory that MMSegmentation's model zoo states for SegFormer on V100 cards.

    python benchmarks/published/segformer.py [--only WORD ...] [--json FILE]

The recipe, from its configurations: float32, AdamW, DistributedDataParallel over 8 (ADE20K) cards, random crops of the
stated side, 2 or 1 a card; torch 1.8, which zeroes gradients where later releases free them.
Measured is ``torch.cuda.max_memory_allocated`` as the logger writes it, to one or two places of a GB, so a row is known
to 0.3% to 2.4% only.

What is not counted: cuDNN's workspaces, which ``cudnn_benchmark`` (on in these configurations) makes as large as the
fastest algorithm wants, and what synchronized batch norm gathers (some KB).
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import torch
from mit import SegFormer
from records import Row
from source import Source, main

from vram_guard import TrainingStep
from vram_guard.simulate.tracing.run import run_step

DATA = Path(__file__).parent / "data"

#: V100.
CAPABILITY = (7, 0)
CARDS = 8

#: The logger divides bytes by 2**20, the model zoo that by 1000 or 1024: the smaller unit is taken.
GIGABYTE = 1000 * 2**20


class KeptGradients(torch.optim.AdamW):
    """AdamW of torch 1.8: one parameter after the other, and gradients are zeroed in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=6e-5, weight_decay=0.01, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - torch 2's default is the other
        super().zero_grad(set_to_none=False)


def rows() -> list[dict[str, str]]:
    """All rows, in the file's order."""
    with (DATA / "segformer.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def name(row: dict[str, str]) -> str:
    """How a row is called in the table."""
    return f"{row['model']} {row['dataset']} {row['crop']} {row['per_gpu_batch']}"


def predict(row: dict[str, str]) -> list[Row]:
    """The allocated peak of one configuration."""
    side, size = int(row["crop"].split("x")[0]), int(row["per_gpu_batch"])

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(samples, 3, side, side, device="meta")
        return images, torch.empty(samples, side, side, dtype=torch.long, device="meta")

    step = TrainingStep(
        model=lambda: SegFormer(row["model"], int(row["num_classes"])),
        batch=batch,
        loss=lambda model, inputs: model(*inputs),
        optimizer=KeptGradients,
        zero_grad="before_backward",
        data_parallel_ranks=CARDS,
    )
    start = time.perf_counter()
    timeline = run_step(step, size, CAPABILITY)
    peak = timeline.at(size).peak_allocated
    seconds = time.perf_counter() - start
    measured = round(float(row["memory_GB"]) * GIGABYTE)
    return [Row(SEGFORMER.title, name(row), measured, peak, timeline.tier, seconds)]


SEGFORMER = Source("MMSegmentation's SegFormer", rows, name, predict)


if __name__ == "__main__":
    raise SystemExit(main(segformer=SEGFORMER))
