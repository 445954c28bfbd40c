"""Llama 3, written so that a training step takes and gives back memory as torchtitan's does.

What counts for memory was read in torchtitan's ``models/llama/model.py`` and ``models/norms.py`` (9dec370, December
2024): which operators run in which order and dtype, and which names are alive while they do.
Weights are never initialised: nothing here has values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Literal["composed", "late", "native"]


@dataclass(frozen=True)
class Sizes:
    """A model of the family (torchtitan's ``llama3_configs``)."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    multiple_of: int = 1024
    vocabulary: int = 128_256

    @property
    def hidden(self) -> int:
        """Width within the feed-forward: two thirds of four times the width, enlarged by 1.3, rounded up."""
        wanted = int(1.3 * int(2 * 4 * self.width / 3))
        return self.multiple_of * -(-wanted // self.multiple_of)


LLAMA_8B = Sizes()


class RMSNorm(nn.Module):
    """Root mean square norm of single operators, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x.float()).type_as(x) * self.weight

    @staticmethod
    def _normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class LateRMSNorm(RMSNorm):
    """``torch.rms_norm`` as it was composed before it had a kernel: cast back after the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight).type_as(x)


def _norm(kind: Norm, width: int) -> nn.Module:
    if kind == "native":
        return nn.RMSNorm(width, eps=1e-5)
    return RMSNorm(width) if kind == "composed" else LateRMSNorm(width)


def _rotated(queries: Tensor, keys: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding by complex products in float32; both complex copies live until the end."""
    turned_queries = torch.view_as_complex(queries.float().reshape(*queries.shape[:-1], -1, 2))
    turned_keys = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
    angles = angles[: queries.shape[1]].view(1, queries.shape[1], 1, -1)
    first = torch.view_as_real(turned_queries * angles).flatten(3)
    second = torch.view_as_real(turned_keys * angles).flatten(3)
    return first.type_as(queries), second.type_as(keys)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each head of keys or values for several heads of queries."""
    batch, length, heads, width = x.shape
    return x[:, :, :, None].expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.times = sizes.heads // sizes.key_heads
        self.wq = nn.Linear(sizes.width, sizes.heads * self.head_width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.key_heads * self.head_width, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.key_heads * self.head_width, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head_width, sizes.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = self.wq(x), self.wk(x), self.wv(x)
        queries = queries.view(batch, length, -1, self.head_width)
        keys = keys.view(batch, length, -1, self.head_width)
        values = values.view(batch, length, -1, self.head_width)
        queries, keys = _rotated(queries, keys, angles)
        # Names that stay as torchtitan's do: what was rotated is replaced, what was repeated is not.
        all_keys = _repeated(keys, self.times)
        all_values = _repeated(values, self.times)
        queries = queries.transpose(1, 2)
        keys = all_keys.transpose(1, 2)
        values = all_values.transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous()
        mixed = mixed.view(batch, length, -1)
        return self.wo(mixed)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside the way past it."""

    def __init__(self, sizes: Sizes, norm: Norm) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = _norm(norm, sizes.width)
        self.ffn_norm = _norm(norm, sizes.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        between = x + self.attention(self.attention_norm(x), angles)
        return between + self.feed_forward(self.ffn_norm(between))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Embedding, blocks, norm, projection to the vocabulary; no weight is shared.

    Args:
        sizes: of the model.
        length: positions for which the rotation is tabled.
        norm: "composed": of single operators in float32; "late": the same, cast back after the weight (torch's own
            until 2.8); "native": ``nn.RMSNorm``.
    """

    def __init__(self, sizes: Sizes, length: int, norm: Norm = "composed") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.register_buffer("angles", torch.empty(length, sizes.width // sizes.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(number): Block(sizes, norm) for number in range(sizes.layers)})
        self.norm = _norm(norm, sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.angles)
        x = self.norm(x)
        return self.output(x)  # type: ignore[no-any-return]
