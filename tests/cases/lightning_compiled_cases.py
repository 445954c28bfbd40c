"""Modules that Lightning compiles."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from compiled_cases import Block
from lightning_cases import NAMESPACE
from torch import nn

pl = importlib.import_module(NAMESPACE)


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, hook: str = "", count: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(count)))
        self.hook = hook

    def compile_in(self, hook: str) -> None:
        if hook == self.hook:
            for number, block in enumerate(self.net):
                # As people write both: in place, and wrapped.
                block.compile(backend="inductor") if number else self.net.__setitem__(0, torch.compile(block))

    def configure_model(self) -> None:
        self.compile_in("configure_model")

    def setup(self, stage: str) -> None:
        self.compile_in("setup")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(pl.Callback):  # type: ignore[misc, name-defined]
    """Ends the training before its first step, which would need a C++ compiler."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0
