"""The training of guide 001: a diffusion transformer unlearns a concept beside its frozen twin and a text encoder.

CogVideoX-5b's configuration (its ``transformer/config.json``: 42 layers of 48 heads, rotary embeddings; 5.57 billion
parameters) by diffusers, its text encoder T5-v1.1-XXL (24 layers of width 4096; 4.76 billion parameters, not the 220
million of T5-base) by transformers. Random weights, nothing is downloaded.

The loss is that of "Erasing Concepts from Diffusion Models" (Gandikota et al. 2023, equation 7): the trained model is
driven away from what its frozen twin makes of the concept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: As in the guide: 17 latent frames of 32 x 32 with 16 channels, in half precision.
FRAMES, CHANNELS, SIDE = 17, 16, 32
#: Tokens of a prompt: ``max_text_seq_length`` of the configuration.
TOKENS = 226
HEADS, HEAD_WIDTH, LAYERS = 48, 64, 42
#: A latent frame is cut into patches of 2 x 2.
PATCH = 2
TRAIN_STEPS = 1000
#: The strength of the guidance in equation 7; its default there is 1.
ETA = 1.0


class Unlearning(nn.Module):
    """The trained transformer, its frozen twin and the frozen text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.unlearned = _transformer()
        self.original = _transformer().requires_grad_(False)
        self.text_encoder = _text_encoder().requires_grad_(False)
        cos, sin = _rotary()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("kept", torch.linspace(0.9991, 0.0, TRAIN_STEPS).cumprod(0), persistent=False)

    def predicted(self, model: nn.Module, noisy: Tensor, text: Tensor, steps: Tensor) -> Tensor:
        """A transformer's prediction for noisy latents (N, frames, channels, height, width), in the same shape."""
        out: Tensor = model(noisy, text, steps, image_rotary_emb=(self.cos, self.sin), return_dict=False)[0]
        return out

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Equation 7 for one batch. The forward of the whole, as FSDP2 needs it: its root gathers its weights there."""
        latents, steps = batch["latents"], batch["steps"]
        noise = torch.randn_like(latents)
        kept = self.kept[steps].to(latents.dtype)[:, None, None, None, None]
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        with torch.no_grad():
            concept = self.text_encoder(batch["concept"])[0]
            nothing = self.text_encoder(batch["nothing"])[0]
            without = self.predicted(self.original, noisy, nothing, steps)
            towards = self.predicted(self.original, noisy, concept, steps) - without
            target = without - ETA * towards
        return nn.functional.mse_loss(self.predicted(self.unlearned, noisy, concept, steps), target)


def batch(size: int) -> dict[str, Tensor]:
    """Latents (N, frames, channels, height, width) in bfloat16, time steps (N,) and tokens (N, 226)."""
    return {
        "latents": torch.zeros(size, FRAMES, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16),
        "steps": torch.zeros(size, dtype=torch.long),
        "concept": torch.zeros(size, TOKENS, dtype=torch.long),
        "nothing": torch.zeros(size, TOKENS, dtype=torch.long),
    }


def loss(model: Any, data: dict[str, Tensor]) -> Tensor:
    """The loss, as a step calls it."""
    value: Tensor = model(data)
    return value


def _transformer() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    model: nn.Module = CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        num_layers=LAYERS,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        max_text_seq_length=TOKENS,
        use_rotary_positional_embeddings=True,
    )
    return model


def _text_encoder() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    encoder: nn.Module = T5EncoderModel(config).eval()
    return encoder


def _rotary() -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding: (frames x height x width in patches, head width) each."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    side = SIDE // PATCH
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=HEAD_WIDTH, crops_coords=((0, 0), (side, side)), grid_size=(side, side), temporal_size=FRAMES
    )
    return cos, sin
