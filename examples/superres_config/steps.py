"""A small super-resolution training, as ``vram-guard optimize``, ``compare`` and ``assert_fits`` take it by its name.

The function's parameters are filled from the config's entries of the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vram_guard import TrainingStep


class Block(nn.Module):
    """Two convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return images + self.second(torch.relu(self.first(images)))


def training_step(
    base_channels: int = 32, num_blocks: int = 4, patch_size: int = 128, lr: float = 1e-4
) -> TrainingStep:
    """Patches of ``patch_size`` x ``patch_size`` pixels to twice that size; L1 loss, AdamW."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, base_channels, 3, padding=1),
            *(Block(base_channels) for _ in range(num_blocks)),
            nn.Conv2d(base_channels, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.rand(size, 3, patch_size, patch_size), torch.rand(size, 3, 2 * patch_size, 2 * patch_size)

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        small, large = batch
        return nn.functional.l1_loss(network(small), large)

    return TrainingStep(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=float(lr)),
    )
