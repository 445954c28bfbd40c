"""GPT-2 small as build-nanogpt writes it: learned positions, tied embeddings, attention written out or fused.

github.com/karpathy/build-nanogpt, ``train_gpt2.py``: 12 layers of width 768 with 12 heads, biases everywhere, GELU by
its tanh formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH, LAYERS, HEADS, WIDTH = 1024, 12, 12, 768
VOCABULARY, ROUND_VOCABULARY = 50_257, 50_304


class Block(nn.Module):
    """One layer."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if not fused:
            self.register_buffer("seen", torch.ones(1, 1, LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        queries, keys, values = heads
        mixed = self._written_out(queries, keys, values)
        x = x + self.out(mixed.transpose(1, 2).contiguous().flatten(-2))
        made: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return made

    def _written_out(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.fused:
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        length = queries.shape[-2]
        scores = (queries @ keys.transpose(-2, -1)) * (1.0 / math.sqrt(queries.shape[-1]))
        scores = scores.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        return functional.softmax(scores, dim=-1) @ values


class Gpt(nn.Module):
    """Tokens to the loss of the next one."""

    def __init__(self, *, fused: bool, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fused=fused) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
