"""The trainings of the table: published sizes, random weights, AdamW. Nothing is downloaded, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plans import diffusion
from benchmarks.plans.unet import TEXT_WIDTH, UNet
from vram_guard import TrainingStep


@dataclass(frozen=True)
class Workload:
    """One training as its author wrote it."""

    title: str
    batch_size: int
    step: TrainingStep
    needs: tuple[str, ...] = ()
    """Packages that must be importable."""

    def prepare(self) -> None:
        """Import what building the model imports lazily, so that no planning time contains it."""
        with torch.device("meta"):
            self.step.model()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with its defaults."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def gpt2_medium() -> nn.Module:
    """354,823,168 parameters, up to 1024 positions (Radford et al. 2019, table 2, second row)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
    return model


def vit_large() -> nn.Module:
    """ViT-L/16 for 1000 classes, 304,326,632 parameters (Dosovitskiy et al. 2021, table 1)."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def _tokens(size: int) -> dict[str, Tensor]:
    return {name: torch.zeros(size, 1024, dtype=torch.long) for name in ("input_ids", "labels")}


def _images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(size, 3, 224, 224), "labels": torch.zeros(size, dtype=torch.long)}


def _latents(size: int) -> dict[str, Tensor]:
    return {
        "latents": torch.zeros(size, 4, 64, 64),
        "steps": torch.zeros(size, dtype=torch.long),
        "text": torch.zeros(size, 77, TEXT_WIDTH),
    }


def _own_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _noise_loss(model: Any, batch: Any) -> Tensor:
    """Predict the noise that was added (Ho et al. 2020, equation 14); the schedule makes no difference in memory."""
    noise = torch.randn_like(batch["latents"])
    return nn.functional.mse_loss(model(batch["latents"] + noise, batch["steps"], batch["text"]), noise)


def _step(model: Callable[[], nn.Module], batch: Any, loss: Any) -> TrainingStep:
    return TrainingStep(model=model, batch=batch, loss=loss, optimizer=adamw)


WORKLOADS = {
    "gpt2-medium": Workload(
        "GPT-2 medium, 16 x 1024 tokens, 32-true",
        16,
        _step(gpt2_medium, _tokens, _own_loss),
        ("transformers",),
    ),
    "vit-large": Workload(
        "ViT-L/16, 128 x 3 x 224 x 224, 32-true", 128, _step(vit_large, _images, _own_loss), ("transformers",)
    ),
    "unet": Workload("U-Net of latent diffusion, 16 x 4 x 64 x 64, 32-true", 16, _step(UNet, _latents, _noise_loss)),
    "cogvideox": Workload(
        "CogVideoX-5b, frozen twin, T5-XXL, 4 x 17 x 16 x 32 x 32, bf16-true",
        4,
        _step(diffusion.Unlearning, diffusion.batch, diffusion.loss).with_(precision="bf16-true"),
        ("transformers", "diffusers"),
    ),
}
