"""Blocks of which compiled code keeps less than uncompiled code, and whether this torch's compiler is followed."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from vram_guard.private_names import missing_names
from vram_guard.simulate.private_api import COMPILER_NAMES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of imports
    MISSING = missing_names(COMPILER_NAMES)

WIDTH = 64


class Block(nn.Module):
    """A matrix product and a chain of pointwise operators, each of which keeps something in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).sin().tanh().exp()
