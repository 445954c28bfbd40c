"""The language model of the recordings ``lm-2.7b-*``: what its author's code asks of the GPU, described anew.

Source: kkaitlyn111/cs336-a2-systems (``cs336_systems/benchmark.py``) and the model that it imports, from
kkaitlyn111/cs336-assignment1 (``cs336_basics/{transformer,optimizers,training}.py``), both on GitHub. Which operators
run, in which order, and how long each result has a name is theirs; the writing is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 10_000, 2560, 10_240, 32, 32
BATCH = 4


class Linear(nn.Module):
    """A linear layer as an einsum whose first operand is the weight, as torch 2.6 contracts it.

    The result is a transposed view, and the weight's gradient comes out as the weight is laid out. From 2.9 on einsum
    changes its operands over (pytorch/pytorch, pull request 161755), hence the product that is written out here.
    Autocast casts einsum's operands as their list has them, but a product's from the last one on.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, features: Tensor) -> Tensor:
        """Project the last dimension."""
        weight = self.weight
        if torch.is_autocast_enabled("cuda"):
            weight = weight.to(torch.get_autocast_dtype("cuda"))
            features = features.to(weight.dtype)
        columns = features.permute(2, 0, 1).reshape(1, features.size(-1), -1)
        return torch.bmm(weight[None], columns).view(-1, *features.shape[:2]).permute(1, 2, 0)


class Embedding(nn.Module):
    """Rows of a table, by indexing: backward is that of an index, not of ``F.embedding``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """The row of every token."""
        return self.weight[tokens]


class Norm(nn.Module):
    """RMSNorm by way of the vector's norm, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise the last dimension."""
        dtype = features.dtype
        features = features.to(torch.float32)
        length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
        scale = torch.sqrt(length**2 / WIDTH + 1e-5)
        normal = features / scale
        result = torch.einsum("d,bsd->bsd", self.weight, normal)
        return result.to(dtype)


class Rotation(nn.Module):
    """Rotary positions: each pair of neighbours is turned in place of zeros. Every layer has a table of its own."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(context, WIDTH // HEADS // 2, 2), persistent=False)

    def forward(self, heads: Tensor, places: Tensor) -> Tensor:
        """Rotate [batch, heads, sequence, size of a head] as the [batch, sequence] places say."""
        pairs = heads.unflatten(-1, (-1, 2))
        cosine = self.table[places, :, 0]  # type: ignore[index]
        sine = self.table[places, :, 1]  # type: ignore[index]
        cosine = cosine.unsqueeze(1)
        sine = sine.unsqueeze(1)
        turned = torch.zeros_like(pairs)
        turned[..., 0] = cosine * pairs[..., 0] - sine * pairs[..., 1]
        turned[..., 1] = sine * pairs[..., 0] + cosine * pairs[..., 1]
        result = turned.reshape(heads.shape)
        return result  # noqa: RET504 - names live until the function ends, as they do there


def softmax(scores: Tensor) -> Tensor:
    """Softmax of the last dimension by elementary operators."""
    largest = torch.max(scores, dim=-1, keepdim=True)[0]
    exponents = torch.exp(scores - largest)
    total = torch.sum(exponents, dim=-1, keepdim=True)
    result = exponents / total
    return result  # noqa: RET504


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention as two products with a softmax between them."""
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712 - an operator, not a question
    weights = softmax(scores)
    result = torch.einsum("...qk,...kd->...qd", weights, value)
    return result  # noqa: RET504


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotation = Rotation(context)

    def forward(self, features: Tensor) -> Tensor:
        """Attend, each position to those before it."""
        batch, length, _ = features.shape
        flat = self.query(features), self.key(features), self.value(features)
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in flat)
        places = torch.arange(length, device=features.device).unsqueeze(0).expand(batch, -1)
        query = self.rotation(query, places)
        key = self.rotation(key, places)
        mask = torch.triu(torch.ones(length, length, device=features.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, HEADS, -1, -1)
        result = attention(query, key, value, mask)
        result = result.transpose(1, 2).flatten(2)
        result = self.output(result)
        return result  # noqa: RET504


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, features: Tensor) -> Tensor:
        """Gate times up, and down again."""
        gate = self.gate(features)
        up = self.up(features)
        opened = torch.sigmoid(gate) * gate
        product = opened * up
        result = self.down(product)
        return result  # noqa: RET504


class Block(nn.Module):
    """A layer that normalises before attention and before the feed-forward part."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.before_attention, self.attention = Norm(), Attention(context)
        self.before_feed, self.feed = Norm(), FeedForward()

    def forward(self, features: Tensor) -> Tensor:
        """Both parts, each added to what it was given."""
        inner = self.before_attention(features)
        inner = self.attention(inner)
        features = features + inner
        inner = self.before_feed(features)
        inner = self.feed(inner)
        features = features + inner
        return features  # noqa: RET504


class LanguageModel(nn.Module):
    """The whole model; ``context`` is the sequence's length."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Block(context) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of [batch, sequence] tokens."""
        features = self.embedding(tokens)
        for layer in self.layers:
            features = layer(features)
        features = self.norm(features)
        return self.head(features)  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of the targets' negative logarithms; the rows are numbered on the host, as they are there."""
    logits = logits.reshape(-1, logits.size(-1))
    targets = targets.reshape(-1)
    largest = torch.max(logits, dim=-1, keepdim=True).values
    logits = logits - largest
    exponents = torch.exp(logits)
    total = exponents.sum(dim=-1)
    rows = torch.arange(logits.shape[0])
    chosen = logits[rows, targets]
    losses = torch.log(total) - chosen
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """AdamW in place, parameter by parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    def step(self, _closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                state = self.state[parameter]
                if not state:
                    state["steps"] = 0
                    state["mean"] = torch.zeros_like(parameter.data)
                    state["square"] = torch.zeros_like(parameter.data)
                mean, square = state["mean"], state["square"]
                state["steps"] += 1
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                bottom = (square.sqrt() / math.sqrt(1 - 0.95 ** state["steps"])).add_(1e-8)
                parameter.data.addcdiv_(mean, bottom, value=-1e-4)
                parameter.data.add_(parameter.data, alpha=-1e-6)
