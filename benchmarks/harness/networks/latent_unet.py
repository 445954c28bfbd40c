"""The U-Net of latent diffusion: residual blocks with a time embedding, and transformers conditioned on a text.

Written out after Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models" (section 3.3 and
appendix E), in the size that Stable Diffusion 1 made common: 859,520,964 parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, scaled_dot_product_attention

CHANNELS = (320, 640, 1280, 1280)
BLOCKS_PER_LEVEL = 2
HEADS = 8
TIME_WIDTH = 1280
TEXT_WIDTH = 768
GROUPS = 32


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut; the time embedding is added in between."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Linear(TIME_WIDTH, width)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(nn.functional.silu(self.norm1(x)))
        out = out + self.time(nn.functional.silu(time))[:, :, None, None]
        out = self.conv2(nn.functional.silu(self.norm2(out)))
        shortcut: Tensor = self.shortcut(x)
        return shortcut + out


class Attention(nn.Module):
    """Multi-head attention of (N, L, width) to itself, or to a context (N, M, context)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = (self.query(x), self.key(context), self.value(context))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class GatedFeedForward(nn.Module):
    """GEGLU of four times the width (Shazeer 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gated = nn.Linear(width, 8 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.gated(x).chunk(2, dim=-1)
        out: Tensor = self.out(value * gelu(gate))
        return out


class TransformerBlock(nn.Module):
    """Every pixel attends to all pixels, then to the text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.into = nn.Conv2d(width, width, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.to_pixels = Attention(width, width)
        self.to_text = Attention(width, TEXT_WIDTH)
        self.feed_forward = GatedFeedForward(width)
        self.back = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        _, _, height, _ = x.shape
        tokens = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norm1(tokens)
        tokens = tokens + self.to_pixels(normed, normed)
        tokens = tokens + self.to_text(self.norm2(tokens), text)
        tokens = tokens + self.feed_forward(self.norm3(tokens))
        out: Tensor = self.back(tokens.transpose(1, 2).unflatten(2, (height, -1)))
        return x + out


class Stage(nn.Module):
    """A residual block, and a transformer where there is attention on this level."""

    def __init__(self, channels: int, width: int, *, attention: bool) -> None:
        super().__init__()
        self.residual = ResidualBlock(channels, width)
        self.transformer = TransformerBlock(width) if attention else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class Upsample(nn.Module):
    """Twice as large, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class UNet(nn.Module):
    """Predicts the noise in latents.

    Shapes: latents (N, 4, H, W), time steps (N,), text (N, M, 768) -> (N, 4, H, W); H and W are multiples of 8.
    """

    def __init__(self) -> None:
        super().__init__()
        first = CHANNELS[0]
        self.time = nn.Sequential(nn.Linear(first, TIME_WIDTH), nn.SiLU(), nn.Linear(TIME_WIDTH, TIME_WIDTH))
        self.first = nn.Conv2d(4, first, 3, padding=1)
        self.down, skips = _down()
        self.middle = nn.ModuleList(
            [
                Stage(CHANNELS[-1], CHANNELS[-1], attention=True),
                Stage(CHANNELS[-1], CHANNELS[-1], attention=False),
            ]
        )
        self.up = _up(skips)
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, first), nn.SiLU(), nn.Conv2d(first, 4, 3, padding=1))

    def forward(self, latents: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        time = self.time(_embedded(steps, CHANNELS[0]).to(latents.dtype))
        x = self.first(latents)
        kept = [x]
        for part in self.down:
            x = part(x, time, text) if isinstance(part, Stage) else part(x)
            kept.append(x)
        for part in self.middle:
            x = part(x, time, text)
        for part in self.up:
            x = part(torch.cat([x, kept.pop()], dim=1), time, text) if isinstance(part, Stage) else part(x)
        out: Tensor = self.last(x)
        return out


def _down() -> tuple[nn.ModuleList, list[int]]:
    """The way down, and the channels of everything that the way up uses again."""
    parts, channels = nn.ModuleList(), CHANNELS[0]
    skips = [channels]
    for level, width in enumerate(CHANNELS):
        for _ in range(BLOCKS_PER_LEVEL):
            parts.append(Stage(channels, width, attention=_attends(level)))
            channels = width
            skips.append(channels)
        if level < len(CHANNELS) - 1:
            parts.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
            skips.append(channels)
    return parts, skips


def _up(skips: list[int]) -> nn.ModuleList:
    """The way up: one stage more on each level than on the way down."""
    parts, channels, left = nn.ModuleList(), CHANNELS[-1], list(skips)
    for level, width in reversed(list(enumerate(CHANNELS))):
        for _ in range(BLOCKS_PER_LEVEL + 1):
            parts.append(Stage(channels + left.pop(), width, attention=_attends(level)))
            channels = width
        if level:
            parts.append(Upsample(channels))
    return parts


def _attends(level: int) -> bool:
    """On all levels but the coarsest."""
    return level < len(CHANNELS) - 1


def _embedded(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the time step: (N,) -> (N, width) (Vaswani et al. 2017, section 3.5)."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=steps.device) / (width // 2))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def batch(size: int) -> dict[str, Tensor]:
    """Latents, time steps and 77 tokens of text."""
    return {
        "latents": torch.zeros(size, 4, 64, 64),
        "steps": torch.zeros(size, dtype=torch.long),
        "text": torch.zeros(size, 77, TEXT_WIDTH),
    }


def noise_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Predict the noise that was added (Ho et al. 2020, equation 14); the schedule makes no difference in memory."""
    noise = torch.randn_like(batch["latents"])
    return nn.functional.mse_loss(model(batch["latents"] + noise, batch["steps"], batch["text"]), noise)
