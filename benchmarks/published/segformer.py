"""Predict the training memory that MMSegmentation's model zoo states for SegFormer on V100 cards.

The recipe, from its configurations: float32, AdamW, DistributedDataParallel over 8 (ADE20K) cards, random crops of the
stated side, 2 or 1 a card; torch 1.8, which zeroes gradients where later releases free them.
Measured is ``torch.cuda.max_memory_allocated`` as the logger writes it, to one or two places of a GB, so a row is known
to 0.3% to 2.4% only.

What is not counted: cuDNN's workspaces, which ``cudnn_benchmark`` (on in these configurations) makes as large as the
fastest algorithm wants, and what synchronized batch norm gathers (some KB).
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness.records import Row
from benchmarks.published.mit import SegFormer
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import TrainingStep

CARD = "V100 SXM2 32GB"
CARDS = 8

#: The logger divides bytes by 2**20, the model zoo that by 1000 or 1024: the smaller unit is taken.
GIGABYTE = 1000 * 2**20


class KeptGradients(torch.optim.AdamW):
    """AdamW of torch 1.8: one parameter after the other, and gradients are zeroed in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=6e-5, weight_decay=0.01, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - torch 2's default is the other
        super().zero_grad(set_to_none=False)


def predict(row: Record) -> list[Row]:
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
    found = predicted(
        step,
        size,
        CARD,
        lambda timeline: {"predicted": timeline.at(size).peak_allocated},
        source=SEGFORMER.title,
        name=SEGFORMER.name(row),
        measured=round(float(row["memory_GB"]) * GIGABYTE),
    )
    return [found]


SEGFORMER = Source(
    "MMSegmentation's SegFormer",
    lambda: records_of("segformer.csv"),
    lambda row: f"{row['model']} {row['dataset']} {row['crop']} {row['per_gpu_batch']}",
    predict,
)

SOURCES = (SEGFORMER,)
