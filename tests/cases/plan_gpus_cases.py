"""A small model of repeated blocks, planned over several GPUs, for tests."""

from __future__ import annotations

from typing import Any

import torch
from plan_arguments import in_options
from torch import nn

from vram_guard import Plan, TrainingStep, plan

WIDTH = 256
LINK = "nvlink4,ib400"
#: Layouts that every model can be spread by.
PLAIN = ("ddp", "zero1", "fsdp2", "hsdp", "offload")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(WIDTH, 8))


def a_step(**changes: Any) -> TrainingStep:
    return TrainingStep(
        build,
        lambda size: torch.ones(size, 64, WIDTH),
        lambda model, batch: model(batch).float().sum(),
        torch.optim.AdamW,
        precision="bf16-mixed",
    ).with_(**changes)


def planned(batch_size: int = 4, budget: str = "1GiB", **wishes: Any) -> Plan:
    return plan(a_step(), batch_size, budget, **in_options({"gpus": 16, "link": LINK, "layouts": PLAIN, **wishes}))


def spread(made: Plan) -> Any:
    assert made.spread is not None
    return made.spread
