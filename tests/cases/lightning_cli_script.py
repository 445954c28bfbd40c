"""A training of LightningCLI's, which makes the optimizer of ``--optimizer`` before the training begins."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(784, 10)

    def training_step(self, batch: Any, _batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(256, 784), torch.arange(256) % 10), 64)


LightningCLI(Net)
