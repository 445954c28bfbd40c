"""A small model of repeated blocks, and steps over several GPUs, for tests."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from vram_guard import TrainingStep

#: 7 and 16 ranks, which tests use, do not divide the width: shards are padded.
WIDTH, WORDS, LENGTH = 40, 48, 8


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


class Attention(nn.Module):
    """Heads are counted by an attribute, as in many models."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q_norm = nn.LayerNorm(width // heads)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width)
        self.wv = nn.Linear(width, kv_heads * self.head_width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def heads(layer: nn.Linear, count: int) -> torch.Tensor:
            return layer(x).view(batch, length, count, self.head_width)

        q = self.q_norm(heads(self.wq, self.n_heads)).transpose(1, 2)
        k, v = (heads(layer, self.n_kv_heads).transpose(1, 2) for layer in (self.wk, self.wv))
        k, v = (each.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for each in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)
        self.w3 = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.feed_forward = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Named as Meta's Llama, and with the plan that transformers gives a model with norms of its heads."""

    _tp_plan: ClassVar = {
        **dict.fromkeys((f"layers.*.attention.{name}" for name in ("wq", "wk", "wv")), "colwise"),
        "layers.*.attention.wo": "rowwise",
        "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
        **dict.fromkeys((f"layers.*.feed_forward.{name}" for name in ("w1", "w3")), "colwise"),
        "layers.*.feed_forward.w2": "rowwise",
        "tok_embeddings": "embedding_rowwise",
        "output": "colwise_gather_output",
    }

    def __init__(
        self, layers: int = 2, width: int = 32, heads: int = 8, kv_heads: int = 4, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(words)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
