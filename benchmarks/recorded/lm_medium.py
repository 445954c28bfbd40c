"""The language model of the recordings ``lm-medium-*``: what its authors' code asks of the GPU, described anew.

Source: Wedsonlin/assignment2-systems on GitHub (``cs336-basics/cs336_basics/{model,optimizer,nn_utils}.py`` and
``cs336_systems/nsys_profile.py``). Which operators run, in which order, and how long each result has a name is theirs;
the writing is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 10_000, 1024, 4096, 24, 16
BATCH, WARM_UPS = 4, 5


class Linear(nn.Module):
    """A linear layer as an einsum: a batched product, whose gradient is laid out otherwise than ``F.linear``'s."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, features: Tensor) -> Tensor:
        """Project the last dimension."""
        return torch.einsum("bsi,oi->bso", features, self.weight)


class Embedding(nn.Module):
    """Rows of a table, by indexing: backward is that of an index, not of ``F.embedding``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """The row of every token."""
        return self.weight[tokens, :]


class Norm(nn.Module):
    """RMSNorm by elementary operators, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise the last dimension."""
        dtype = features.dtype
        features = features.to(torch.float32)
        scale = torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-5)
        features = features * scale
        return (self.weight * features).to(dtype)


class Rotation(nn.Module):
    """Rotary positions: pairs of neighbours are turned, and the halves come out one behind the other."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, context, WIDTH // HEADS // 2), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Rotate [batch, heads, sequence, size of a head]."""
        even, odd = heads.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.table[:, : heads.size(-2), :].unbind(0)  # type: ignore[index]
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        both = torch.concat((first, second), dim=-1)
        return both  # noqa: RET504 - the parts live until the function ends, as they do there


def softmax(scores: Tensor) -> Tensor:
    """Softmax of the last dimension by elementary operators."""
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    exponents = torch.exp(shifted)
    return exponents / torch.sum(exponents, dim=-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention as two products with a softmax between them."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotation = rotation

    def forward(self, features: Tensor) -> Tensor:
        """Attend, each position to those before it."""
        query, key, value = self.query(features), self.key(features), self.value(features)
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        places = torch.arange(features.size(1), device=features.device)
        mask = places[:, None] >= places[None, :]
        mask = mask[None]
        attended = attention(query, key, value, mask)
        attended = attended.transpose(1, 2).flatten(2)
        projected = self.output(attended)
        return projected  # noqa: RET504


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, features: Tensor) -> Tensor:
        """Gate times up, and down again."""
        return self.down(_silu(self.gate(features)) * self.up(features))


def _silu(features: Tensor) -> Tensor:
    return features * torch.sigmoid(features)


class Block(nn.Module):
    """A layer that normalises before attention and before the feed-forward part."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.attention, self.feed = Attention(rotation), FeedForward()
        self.before_attention, self.before_feed = Norm(), Norm()

    def forward(self, features: Tensor) -> Tensor:
        """Both parts, each added to what it was given."""
        attended = self.attention(self.before_attention(features))
        middle = features + attended
        fed = self.feed(self.before_feed(middle))
        result = middle + fed
        return result  # noqa: RET504


class LanguageModel(nn.Module):
    """The whole model; ``context`` is the sequence's length."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.rotation = Rotation(context)
        self.layers = nn.ModuleList(Block(self.rotation) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of [batch, sequence] tokens."""
        embedded = self.embedding(tokens)
        features = embedded
        for layer in self.layers:
            features = layer(features)
        features = self.norm(features)
        logits = self.head(features)
        return logits  # noqa: RET504


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of the targets' negative logarithms."""
    negative = -_log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def _log_softmax(logits: Tensor) -> Tensor:
    largest = torch.max(logits, dim=-1, keepdim=True)[0]
    logits = logits - largest
    return logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """AdamW out of place: each of its names lives until the next parameter gives it another value."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, _closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                state = self.state[parameter]
                rate, steps = group["lr"], state.get("steps", 1)
                corrected = rate * (math.sqrt(1 - 0.999**steps) / (1 - 0.9**steps))
                parameter.data -= rate * 0.01 * parameter.data
                # The zeros are made at every step, also where there is a state.
                old_mean = state.get("mean", torch.zeros_like(gradient))
                old_square = state.get("square", torch.zeros_like(gradient))
                mean = 0.9 * old_mean + (1 - 0.9) * gradient
                square = 0.999 * old_square + (1 - 0.999) * torch.square(gradient)
                parameter.data -= corrected * mean / (torch.sqrt(square) + 1e-8)
                state["mean"], state["square"], state["steps"] = mean, square, steps + 1
