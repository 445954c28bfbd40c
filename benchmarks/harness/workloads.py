"""Training steps of a network, a batch, a loss and an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vram_guard import TrainingStep


def optimizer_of(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of torch.optim, to be made of parameters."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **settings)
        return optimizer

    return make


def step_of(model: Any, batch: Any, loss: Any, optimizer: str = "AdamW", **settings: Any) -> TrainingStep:
    """A step of the benchmark's networks; ``settings`` are the optimizer's."""
    return TrainingStep(model=model, batch=batch, loss=loss, optimizer=optimizer_of(optimizer, **settings))
