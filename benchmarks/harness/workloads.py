"""Whole trainings: published sizes, random weights, AdamW. Nothing is downloaded, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.networks import NETWORKS, batches, language
from vram_guard import TrainingStep


@dataclass(frozen=True)
class Workload:
    """One training as its author wrote it."""

    title: str
    batch_size: int
    step: TrainingStep

    def build(self) -> Any:
        """The model."""
        step: Any = self.step
        return step.model()

    def made(self) -> tuple[Any, dict[str, Tensor], Any]:
        """Model, batch and optimizer."""
        step: Any = self.step
        model = self.build().train()
        return model, step.batch(self.batch_size), step.optimizer(p for p in model.parameters() if p.requires_grad)

    def prepare(self) -> None:
        """Import what building the model and the first optimizer step import lazily, so that no time contains it."""
        import torch._dynamo

        with torch.device("meta"):
            self.build()


def optimizer_of(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of torch.optim, to be made of parameters."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **settings)
        return optimizer

    return make


def step_of(model: Any, batch: Any, loss: Any, optimizer: str = "AdamW", **settings: Any) -> TrainingStep:
    """A step of the benchmark's networks; ``settings`` are the optimizer's."""
    return TrainingStep(model=model, batch=batch, loss=loss, optimizer=optimizer_of(optimizer, **settings))


def of_suite(name: str, **settings: Any) -> TrainingStep:
    """A step of one of the networks of the GPU's suite."""
    network = NETWORKS[name]
    return step_of(lambda: network.build(False), network.batch, network.loss, **settings)


#: With ``foreach=True``: what CUDA would choose, given to every tool alike.
FOREACH = {"lr": 1e-4, "foreach": True}

_GPT2 = batches.language(1024, 50_257)

WORKLOADS = {
    "gpt2": Workload("GPT-2 small, 8 x 1024", 8, step_of(language.gpt2, _GPT2, batches.own_loss, **FOREACH)),
    "resnet50": Workload("ResNet-50, 64 x 3 x 224 x 224", 64, of_suite("resnet50", **FOREACH)),
    "llama7b": Workload(
        "Llama-7B, 1 x 2048",
        1,
        step_of(language.llama_7b, batches.language(2048, 32_000), batches.own_loss, **FOREACH),
    ),
    "vit-large": Workload(
        "ViT-L/16, 128 x 3 x 224 x 224, 32-true",
        128,
        step_of(language.vit_large, batches.vit_images, batches.own_loss, lr=1e-4),
    ),
}
