"""A small model of repeated blocks, and steps over several GPUs, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vram_guard import TrainingStep

#: 10 divides no number of ranks that tests use but 2 and 5: shards are padded.
WIDTH, WORDS, LENGTH = 40, 50, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batch(size: int) -> torch.Tensor:
    return torch.zeros(size, LENGTH, dtype=torch.long)


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())


def step(parallel: Any = None, **settings: Any) -> TrainingStep:
    given = {
        "model": Net,
        "batch": batch,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "clip_grad_norm": 1.0,
        "parallel": parallel,
    }
    return TrainingStep(**{**given, **settings})
