"""A diffusion transformer that learns from a frozen twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.networks.batches import Batch, copies, random


class DiTBlock(nn.Module):
    """Attention and MLP, both modulated by the time step (Peebles and Xie 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(size, length, width))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """Patches of a (B, 4, 32, 32) latent, predicted noise of the same shape."""

    def __init__(self, width: int = 384, depth: int = 8, heads: int = 6, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2) + self.position
        condition = self.time(time[:, None])
        for block in self.blocks:
            if self.checkpointing:
                hidden = checkpoint(block, hidden, condition, use_reentrant=False)
            else:
                hidden = block(hidden, condition)
        return F.pixel_shuffle(self.head(self.norm(hidden)).transpose(1, 2).unflatten(2, (16, 16)), 2)


class Twins(nn.Module):
    """A student and its frozen teacher: two models in memory, gradients and optimizer state for one."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.student = DiT(checkpointing=checkpointing)
        self.teacher = DiT().requires_grad_(False)


def twin_batch(size: int) -> Batch:
    """Latents (N, 4, 32, 32) and time steps (N,)."""
    return {"x": copies(random(4, 32, 32), size), "time": torch.linspace(0, 1, size)}


def twin_loss(model: Any, batch: Batch) -> Tensor:
    """The student's distance to its teacher on noisy latents."""
    noisy = batch["x"] + torch.randn_like(batch["x"]) * batch["time"][:, None, None, None]
    with torch.no_grad():
        wanted = model.teacher(noisy, batch["time"])
    return F.mse_loss(model.student(noisy, batch["time"]), wanted)
