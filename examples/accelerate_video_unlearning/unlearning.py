"""The loss with which a diffusion transformer unlearns a concept beside its frozen twin.

"Erasing Concepts from Diffusion Models" (Gandikota et al. 2023), equation 7: the trained model is driven away from what
the frozen one makes of the concept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TRAIN_STEPS = 1000
#: The strength of the guidance in equation 7; its default there is 1.
ETA = 1.0


def kept_share() -> Tensor:
    """The share of the signal that is left after each of the diffusion's steps (CogVideoX's scaled linear schedule)."""
    betas = torch.linspace(0.00085**0.5, 0.0120**0.5, TRAIN_STEPS, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0).float()


class Unlearning:
    """Two transformers, a text encoder and the constants that the loss takes."""

    def __init__(self, unlearned: Any, original: nn.Module, text_encoder: nn.Module, rotary: Any, kept: Tensor) -> None:
        self.unlearned = unlearned
        self.original = original
        self.text_encoder = text_encoder
        self.rotary = rotary
        self.kept = kept

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of one batch: latents (N, frames, channels, height, width), prompts (N, tokens) of two kinds."""
        latents = batch["latents"]
        steps = torch.randint(TRAIN_STEPS, (len(latents),), device=latents.device)
        kept = self.kept[steps].to(latents.dtype)[:, None, None, None, None]
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * torch.randn_like(latents)
        with torch.no_grad():
            concept = self.text_encoder(batch["concept"])[0]
            nothing = self.text_encoder(batch["nothing"])[0]
            without = self._predicted(self.original, noisy, nothing, steps)
            towards = self._predicted(self.original, noisy, concept, steps) - without
            target = without - ETA * towards
        made = self._predicted(self.unlearned, noisy, concept, steps)
        return nn.functional.mse_loss(made.float(), target.float())

    def _predicted(self, model: Any, noisy: Tensor, text: Tensor, steps: Tensor) -> Tensor:
        out: Tensor = model(noisy, text.to(noisy.dtype), steps, image_rotary_emb=self.rotary, return_dict=False)[0]
        return out
