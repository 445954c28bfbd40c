"""Predict the training memory that MMSegmentation's model zoo states for SegFormer on V100 cards.

The model, described from the paper (Enze Xie et al., "SegFormer: Simple and Efficient Design for Semantic Segmentation
with Transformers", 2021) and MMSegmentation's configuration: attention through ``nn.MultiheadAttention`` with its
weights (so no fused attention), linear layers of the feed-forward part as 1 x 1 convolutions, stochastic depth of up to
0.1. The runs had torch 1.8, whose softmax and log-softmax kept their input as well as their result for the backward
pass (``_softmax_backward_data(grad, result, dim, self)`` in its ``derivatives.yaml``; torch 1.11 asks for the type).

The recipe, from its configurations: float32, AdamW, DistributedDataParallel over 8 (ADE20K) cards, random crops of the
stated side, 2 or 1 a card; torch 1.8, which zeroes gradients where later releases free them.
Measured is ``torch.cuda.max_memory_allocated`` as the logger writes it, to one or two places of a GB, so a row is known
to 0.3% to 2.4% only.

What is not counted: cuDNN's workspaces, which ``cudnn_benchmark`` (on in these configurations) makes as large as the
fastest algorithm wants, and what synchronized batch norm gathers (some KB).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness.networks.convolutional import conv_bn
from benchmarks.harness.records import Row
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import TrainingStep

HEADS = (1, 2, 5, 8)
REDUCTIONS = (8, 4, 2, 1)
"""Keys and values are taken from a map smaller by this factor."""
STEMS = ((7, 4), (3, 2), (3, 2), (3, 2))
"""Kernel and stride of the convolution before each stage."""
HEAD_WIDTH = 256


class Size(NamedTuple):
    """Width of the first head and blocks of each stage."""

    width: int
    depths: tuple[int, int, int, int]


SIZES = {
    "mit_b0": Size(32, (2, 2, 2, 2)),
    "mit_b1": Size(64, (2, 2, 2, 2)),
    "mit_b2": Size(64, (3, 4, 6, 3)),
    "mit_b3": Size(64, (3, 4, 18, 3)),
    "mit_b4": Size(64, (3, 8, 27, 3)),
    "mit_b5": Size(64, (3, 6, 40, 3)),
}


class Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, over one dimension that keeps input and result."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:  # type: ignore[override]
        result = (torch.log_softmax if log else torch.softmax)(x, dim=dim)
        context.save_for_backward(x, result)
        context.dim, context.log = dim, log
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, result = context.saved_tensors
        aten = torch.ops.aten
        data = aten._log_softmax_backward_data if context.log else aten._softmax_backward_data  # noqa: SLF001
        return data(gradient, result, context.dim, x.dtype), None, None


class MultiheadAttention(nn.Module):
    """Attention over (L, N, C) that also gives its weights, averaged over the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Parameter(torch.empty(3 * width, width))
        self.bias = nn.Parameter(torch.zeros(3 * width))
        self.out = nn.Linear(width, width)

    def forward(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        (length, samples, width), heads = query.shape, self.heads
        weights, biases = self.project.chunk(3), self.bias.chunk(3)
        q = functional.linear(query, weights[0], biases[0]) * (width // heads) ** -0.5
        k, v = (functional.linear(keys, weights[each], biases[each]) for each in (1, 2))
        q, k, v = (
            each.contiguous().view(each.shape[0], samples * heads, width // heads).transpose(0, 1) for each in (q, k, v)
        )
        shares: torch.Tensor = Softmax.apply(torch.bmm(q, k.transpose(1, 2)), -1, False)  # type: ignore[no-untyped-call]
        mixed = torch.bmm(shares, v).transpose(0, 1).contiguous().view(length, samples, width)
        shares.view(samples, heads, length, -1).sum(dim=1).div(heads)  # returned, and not used
        result: torch.Tensor = self.out(mixed)
        return result


class DropPath(nn.Module):
    """Stochastic depth: a sample's branch is left out with this probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.kept = 1.0 - probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept == 1.0:
            return x
        drawn = self.kept + torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x.div(self.kept) * drawn.floor()


class Attention(nn.Module):
    """Attention of all pixels (N, L, C) to a smaller map."""

    def __init__(self, width: int, heads: int, reduction: int, drop: float) -> None:
        super().__init__()
        self.attention = MultiheadAttention(width, heads)
        self.drop = DropPath(drop)
        self.reduce = nn.Conv2d(width, width, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(width, eps=1e-6) if reduction > 1 else None

    def forward(self, x: torch.Tensor, shape: tuple[int, int], identity: torch.Tensor) -> torch.Tensor:
        keys = x
        if self.reduce is not None and self.norm is not None:
            keys = self.norm(_to_pixels(self.reduce(_to_map(x, shape))))
        query, keys = x.transpose(0, 1), keys.transpose(0, 1)
        out = self.attention(query, keys).transpose(0, 1)
        result: torch.Tensor = identity + self.drop(out)
        return result


class MixFFN(nn.Module):
    """The feed-forward part with a depthwise 3 x 3 convolution in between."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        inner = 4 * width
        depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.layers = nn.Sequential(nn.Conv2d(width, inner, 1), depthwise, nn.GELU(), nn.Conv2d(inner, width, 1))
        self.drop = DropPath(drop)

    def forward(self, x: torch.Tensor, shape: tuple[int, int], identity: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = identity + self.drop(_to_pixels(self.layers(_to_map(x, shape))))
        return result


class Block(nn.Module):
    """Attention, then feed-forward; each after its own norm."""

    def __init__(self, width: int, heads: int, reduction: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, reduction, drop)
        self.ffn = MixFFN(width, drop)

    def forward(self, x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        x = self.attention(self.norm1(x), shape, identity=x)
        result: torch.Tensor = self.ffn(self.norm2(x), shape, identity=x)
        return result


class MixTransformer(nn.Module):
    """Four stages; maps of 1/4, 1/8, 1/16 and 1/32 of the image's sides."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        drops = torch.linspace(0, 0.1, sum(size.depths), device="cpu").tolist()
        self.stems, self.stem_norms = nn.ModuleList(), nn.ModuleList()
        self.stages, self.norms = nn.ModuleList(), nn.ModuleList()
        before = 3
        for heads, reduction, (kernel, stride), depth in zip(HEADS, REDUCTIONS, STEMS, size.depths, strict=True):
            width = size.width * heads
            self.stems.append(nn.Conv2d(before, width, kernel, stride, kernel // 2))
            self.stem_norms.append(nn.LayerNorm(width, eps=1e-6))
            self.stages.append(nn.ModuleList(Block(width, heads, reduction, drops.pop(0)) for _ in range(depth)))
            self.norms.append(nn.LayerNorm(width, eps=1e-6))
            before = width

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = []
        for stem, stem_norm, stage, norm in zip(self.stems, self.stem_norms, self.stages, self.norms, strict=True):
            x = stem(x)
            shape = (x.shape[2], x.shape[3])
            x = stem_norm(_to_pixels(x))
            for block in stage:  # type: ignore[attr-defined]
                x = block(x, shape)
            x = _to_map(norm(x), shape)
            maps.append(x)
        return maps


class Head(nn.Module):
    """All maps at the first one's size, side by side, through 1 x 1 convolutions."""

    def __init__(self, size: Size, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv_bn(size.width * heads, HEAD_WIDTH, 1) for heads in HEADS)
        self.fuse = conv_bn(4 * HEAD_WIDTH, HEAD_WIDTH, 1)
        self.dropout = nn.Dropout2d(0.1)
        self.classify = nn.Conv2d(HEAD_WIDTH, classes, 1)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        resized = [
            functional.interpolate(conv(each), size=maps[0].shape[2:], mode="bilinear", align_corners=False)
            for conv, each in zip(self.convs, maps, strict=True)
        ]
        logits: torch.Tensor = self.classify(self.dropout(self.fuse(torch.cat(resized, dim=1))))
        return logits


class SegFormer(nn.Module):
    """Backbone, head, loss and the accuracy that is logged with it."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        self.backbone = MixTransformer(SIZES[name])
        self.head = Head(SIZES[name], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.backbone(images))
        logits = functional.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
        shares = Softmax.apply(logits, 1, True)  # type: ignore[no-untyped-call]
        loss = functional.nll_loss(shares, labels, reduction="none", ignore_index=255).mean()
        _, found = logits.detach().topk(1, dim=1)
        found.transpose(0, 1).eq(labels.unsqueeze(0)).sum()
        return loss


def _to_map(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """(N, L, C) -> (N, C, H, W)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *shape).contiguous()


def _to_pixels(x: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) -> (N, L, C)."""
    return x.flatten(2).transpose(1, 2).contiguous()


# --- the rows ----------------------------------------------------------------------------------------------------

CARD = "V100 SXM2 32GB"
CARDS = 8

#: The logger divides bytes by 2**20, the model zoo that by 1000 or 1024: the smaller unit is taken.
GIGABYTE = 1000 * 2**20


class KeptGradients(torch.optim.AdamW):
    """AdamW of torch 1.8: one parameter after the other, and gradients are zeroed in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=6e-5, weight_decay=0.01, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - torch 2's default is the other
        super().zero_grad(set_to_none=False)


def predict(row: Record) -> list[Row]:
    """The allocated peak of one configuration."""
    side, size = int(row["crop"].split("x")[0]), int(row["per_gpu_batch"])

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(samples, 3, side, side, device="meta")
        return images, torch.empty(samples, side, side, dtype=torch.long, device="meta")

    step = TrainingStep(
        model=lambda: SegFormer(row["model"], int(row["num_classes"])),
        batch=batch,
        loss=lambda model, inputs: model(*inputs),
        optimizer=KeptGradients,
        zero_grad="before_backward",
        data_parallel_ranks=CARDS,
    )
    found = predicted(
        step,
        size,
        CARD,
        lambda timeline: {"predicted": timeline.at(size).peak_allocated},
        source=SEGFORMER.title,
        name=SEGFORMER.name(row),
        measured=round(float(row["memory_GB"]) * GIGABYTE),
    )
    return [found]


SEGFORMER = Source(
    "MMSegmentation's SegFormer",
    lambda: records_of("segformer.csv"),
    lambda row: f"{row['model']} {row['dataset']} {row['crop']} {row['per_gpu_batch']}",
    predict,
)

SOURCES = (SEGFORMER,)
