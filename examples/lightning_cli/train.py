"""A LightningCLI program: the guard stands in ``config.yaml``, and this file does not know it.

No GPU is needed: without one, the budget of the config is planned for and the training runs on the CPU.
"""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(LightningModule):
    """Convolutions over time that take noise off a signal; shapes (N, 1, T) -> (N, 1, T)."""

    def __init__(self, width: int = 16, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4),
            nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4),
            nn.ReLU(),
            nn.Conv1d(width, 1, 9, padding=4),
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean squared distance to the signal without noise."""
        noisy, clean = batch
        return nn.functional.mse_loss(self.network(noisy), clean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class NoisyWaves(LightningDataModule):
    """Sines of random frequency and phase, with and without noise."""

    def __init__(self, batch_size: int = 64, samples: int = 128, length: int = 2048) -> None:
        super().__init__()
        self.batch_size, self.samples, self.length = batch_size, samples, length

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches of (noisy, clean)."""
        time = torch.linspace(0, 2 * math.pi, self.length)
        frequency, phase = 1 + 9 * torch.rand(self.samples, 1, 1), 2 * math.pi * torch.rand(self.samples, 1, 1)
        clean = torch.sin(frequency * time + phase)
        return DataLoader(TensorDataset(clean + 0.3 * torch.randn_like(clean), clean), batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(save_config_callback=None)
