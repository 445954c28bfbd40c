"""MPT, as llm-foundry builds it: learned positions, fused attention, tied embeddings.

Sizes are those of its ``scripts/train/yamls/pretrain``; with them the number of parameters is the one of its table,
but for biases, which are left out: 0.1% of the parameters of the smallest model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 50_368


class Sizes(NamedTuple):
    """A model of the family."""

    width: int
    heads: int
    layers: int


SIZES = {
    "125m": Sizes(768, 12, 12),
    "350m": Sizes(1024, 16, 24),
    "760m": Sizes(1536, 12, 24),
    "1b": Sizes(2048, 16, 24),
    "3b": Sizes(2560, 20, 32),
    "7b": Sizes(4096, 32, 32),
}


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        made: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return made


class Mpt(nn.Module):
    """Tokens to the loss of the next one."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, sizes.width), nn.Embedding(length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
