"""The training steps of the four networks, for ``vram-guard variants``, as they are on the original grid.

vram-guard variants examples/variants_convlstm/steps.py:steps --batch-size 16 --gpu "RTX 3060"
"""

from __future__ import annotations

import torch
from models import CONSTRUCTORS
from torch import Tensor, nn

from vram_guard import TrainingStep

ROWS, CHANNELS = 18, 4


def steps(months: int = 6, columns: int = 48) -> dict[str, TrainingStep]:
    """Name -> step: ``months`` maps of 18 x ``columns`` points, mean squared error over the sea, AdamW.

    Gradients are freed between forward and backward, as Lightning does it.
    """

    def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
        maps = torch.zeros(size, months, CHANNELS, ROWS, columns)
        return maps, torch.zeros(size, ROWS, columns), torch.zeros(size, ROWS, columns)

    return {
        name: TrainingStep(
            model=build, batch=batch, loss=over_the_sea, optimizer=torch.optim.AdamW, zero_grad="before_backward"
        )
        for name, build in CONSTRUCTORS.items()
    }


def over_the_sea(network: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared error of the predicted change, over the sea."""
    maps, change, sea = batch
    return ((network(maps) - change).square() * sea).sum() / sea.sum()
