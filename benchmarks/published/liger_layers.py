"""The layers of Liger-Kernel's benchmarks, described anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from benchmarks.published.liger_base import Operator, WithGradient


class GatedMLP(Operator):
    """Llama's feed-forward block."""

    def __init__(self, shape: tuple[int, int, int], inner: int, activation: Callable[..., Tensor]) -> None:
        super().__init__()
        width = shape[-1]
        self.x = self.wants(*shape, dtype=torch.bfloat16)
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)
        self.activation = activation

    def forward(self) -> Any:
        return self.down(self.activation(self.gate(self.x)) * self.up(self.x))


class LayerNorm(WithGradient):
    """Layer norm in float32."""

    def __init__(self, rows_: int, width: int) -> None:
        super().__init__(rows_, width)
        self.norm, self.twin = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width)

    def forward(self) -> Any:
        return self.norm(self.x)


class RMSNorm(WithGradient):
    """Llama's RMS norm: computed in float32, weight in float32, input in bfloat16."""

    def __init__(self, rows_: int, width: int) -> None:
        super().__init__(rows_, width, dtype=torch.bfloat16)
        self.weight, self.twin = self.wants(width), self.wants(width)

    def forward(self) -> Tensor:
        x = self.x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()


class FusedRMSNorm(Operator):
    """PyTorch's own RMS norm, all in bfloat16, summed up."""

    def __init__(self, length: int, batch: int, width: int) -> None:
        super().__init__()
        self.x = self.wants(length, batch, width, dtype=torch.bfloat16)
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        return self.norm(self.x)

    def gradient(self, output: Tensor) -> None:  # noqa: ARG002
        return None

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:  # noqa: ARG002
        output.sum().backward()


class SwiGLU(FusedRMSNorm):
    """``silu`` of one half times the other half, all in bfloat16, summed up; each run frees its gradient first."""

    def __init__(self, length: int, batch: int, width: int) -> None:
        Operator.__init__(self)
        self.x = self.wants(length, batch, 2 * width, dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        self.x.grad = None
        gate, value = torch.chunk(self.x, 2, -1)
        return F.silu(gate) * value


class AddRMSNorm(Operator):
    """A residual added, then an RMS norm of plain operators; both results get a gradient. All in float32."""

    def __init__(self, rows_: int, width: int) -> None:
        super().__init__()
        self.x, self.residual = self.wants(rows_, width), self.wants(rows_, width)
        self.weight = self.wants(width)
        for twin in ("fused", "liger", "liger_norm"):
            self.register_parameter(twin, self.wants(width))
        for name in ("dy", "ds"):
            self.hold(name, torch.empty(rows_, width))

    def forward(self) -> tuple[Tensor, Tensor]:
        added = self.x + self.residual
        return self.weight * (added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-6)), added

    def gradient(self, output: Any) -> None:  # noqa: ARG002
        return None

    def backward(self, output: Any, gradient: Tensor | None) -> None:  # noqa: ARG002
        torch.autograd.backward(output, (self.dy, self.ds))


class Rope(Operator):
    """Rotary embedding of queries and keys; gradients are asked for by name, and dropped."""

    def __init__(self, length: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head = width // heads
        for name, count in (("q", heads), ("k", kv_heads)):
            self.register_parameter(name, self.wants(1, length, count, head, dtype=torch.bfloat16))
            self.hold(f"d{name}", torch.empty(1, length, count, head, dtype=torch.bfloat16))
        self.hold("cos", torch.empty(1, length, head, dtype=torch.bfloat16))
        self.hold("sin", torch.empty(1, length, head, dtype=torch.bfloat16))
        self.hold("positions", torch.zeros(1, length, dtype=torch.long))
        self.hold("frequencies", torch.empty(head // 2))
        self.tables = False

    def forward(self) -> Any:
        if not self.tables:  # cos and sin came from a matrix product: cuBLAS took its workspace
            torch.matmul(self.frequencies.view(-1, 1), self.positions.float())
            self.tables = True
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        inputs = tuple(t.transpose(1, 2) for t in (self.q, self.k))
        return inputs, tuple(t * cos + _rotate_half(t) * sin for t in inputs)

    def gradient(self, output: Any) -> Any:  # noqa: ARG002
        return self.dq.transpose(1, 2), self.dk.transpose(1, 2)

    def backward(self, output: Any, gradient: Any) -> None:
        inputs, rotated = output
        torch.autograd.grad(rotated, inputs, gradient, retain_graph=True)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


class Sparsemax(WithGradient):
    """Sparsemax by sorting."""

    def forward(self) -> Tensor:
        return _sparsemax(self.x)


def _sparsemax(x: Tensor) -> Tensor:
    ordered, _order = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype).view(1, -1)
    bound = 1 + count * ordered
    support = bound > sums
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    return torch.clamp(x - (total - 1) / k, min=0)


class MultiTokenAttention(WithGradient):
    """A masked softmax over the scores, mixed by a convolution."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__(batch, channels, length, length, dtype=torch.bfloat16)
        self.conv, self.twin = (nn.Conv2d(channels, channels, 3, padding=1, dtype=torch.bfloat16) for _ in "ab")

    def forward(self) -> Any:
        mask = torch.tril(torch.ones(self.x.shape[-1], self.x.shape[-1], dtype=torch.bool, device=self.x.device))
        mask = mask.view(1, 1, *mask.shape)
        low = torch.tensor(-1e9, device=self.x.device, dtype=self.x.dtype)
        zero = torch.tensor(0.0, device=self.x.device, dtype=self.x.dtype)
        hidden = self.x.masked_fill(~mask, low)
        return self.conv(torch.softmax(hidden, dim=-1)).masked_fill(~mask, zero)


class SparseMultiTokenAttention(WithGradient):
    """The same with sparsemax."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__(batch, channels, length, length)
        self.conv, self.twin = (nn.Conv2d(channels, channels, 3, padding=1) for _ in "ab")

    def forward(self) -> Any:
        length = self.x.shape[-1]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=self.x.device)).view(1, 1, length, length)
        low, zero = (torch.tensor(value, device=self.x.device) for value in (-1e9, 0.0))
        z = self.x.masked_fill(~mask, low)
        ordered, _order = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        count = torch.arange(1, length + 1, device=z.device, dtype=z.dtype).view(1, 1, 1, length)
        positive = ordered > -1e8
        condition = (1 + count * ordered > sums) & positive
        k = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(k, torch.ones_like(k))
        tau = (torch.gather(sums, dim=-1, index=safe.long() - 1) - 1) / safe.to(z.dtype)
        tau = torch.where(k == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        return self.conv(probabilities).masked_fill(~mask, zero)


class Softmax(Operator):
    """Over one dimension: the benchmark takes the swept value for the whole shape."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = self.wants(width, dtype=dtype)

    def forward(self) -> Tensor:
        return torch.softmax(self.x, dim=-1)

    def gradient(self, output: Tensor) -> Tensor:
        return torch.ones_like(output)


class NeighborhoodAttention(WithGradient):
    """Attention with a mask of neighbours, everything written out."""

    def __init__(self, batch: int, length: int, width: int, heads: int) -> None:
        super().__init__(batch, length, width)
        self.heads = heads
        self.linears, self.twins = (nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in "ab")

    def forward(self) -> Any:
        batch, length, width = self.x.shape
        head = width // self.heads
        q, k, v = (linear(self.x) for linear in self.linears[:3])
        q, k, v = (t.view(batch, length, self.heads, head).transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(head))
        mask = torch.zeros(length, length, device=self.x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.linears[3](mixed)


class GroupNorm(Operator):
    """Group norm, four channels a group."""

    def __init__(self, batch: int, channels: int, length: int) -> None:
        super().__init__()
        self.x = self.wants(batch, channels, length)
        self.norm, self.twin = (nn.GroupNorm(channels // 4, channels) for _ in "ab")

    def forward(self) -> Any:
        return self.norm(self.x)
