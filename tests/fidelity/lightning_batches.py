"""Batches of all layouts and types."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from .harness import FIT, MICRO, REPORT, TIGHT
from .lightning import Base, Pairs, Rows, Training, case, drawn, loader

#: Of a batch that is not cut, or not where it should be: which part of it is the matter.
CUT = r"batch|sample|dimension|axis|split|cut"


def batches(
    name: str, *modes: str, collate: Callable[[Any], Any] | None = None, data: Any = None, size: int = 8, **about: Any
) -> Callable[[Callable[..., torch.Tensor]], Any]:
    """Register a loss ``function(module, batch)`` over what ``collate`` makes of (x, y) pairs."""

    def register(function: Callable[..., torch.Tensor]) -> Any:
        def make() -> Training:
            class OfBatch(Base):
                def loss(self, batch: Any) -> torch.Tensor:
                    return function(self, batch)

                def training_step(self, batch: Any, batch_idx: int) -> Any:
                    return self.loss(batch)

            made = data() if data is not None else Pairs()
            return Training(OfBatch(), loader(made, size, collate_fn=collate))

        how = {"says": "" if about.get("exact") else CUT, **about}
        case(f"batch {name}", *modes, **how)(make)
        return function

    return register


def squared(m, x, y):
    return F.mse_loss(m.net(x), y)


def stacked(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


batches("tuple", exact=True)(lambda m, batch: squared(m, *batch))
batches("list", collate=lambda s: list(stacked(s)), exact=True)(lambda m, batch: squared(m, *batch))
batches("dict", collate=lambda s: dict(zip("xy", stacked(s), strict=True)), exact=True)(
    lambda m, batch: squared(m, batch["x"], batch["y"])
)
batches("single tensor", collate=lambda s: stacked(s)[0], exact=True)(lambda m, batch: squared(m, batch, batch[:, :4]))


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


batches("namedtuple", collate=lambda s: Named(*stacked(s)), exact=True)(lambda m, batch: squared(m, batch.x, batch.y))


@dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor


batches("dataclass", REPORT, FIT, MICRO, TIGHT, collate=lambda s: Data(*stacked(s)))(
    lambda m, batch: squared(m, batch.x, batch.y)
)


class Movable:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, *args, **kwargs):
        return Movable(self.x.to(*args, **kwargs), self.y.to(*args, **kwargs))


batches("class with to()", REPORT, FIT, MICRO, TIGHT, collate=lambda s: Movable(*stacked(s)))(
    lambda m, batch: squared(m, batch.x, batch.y)
)


class Frozen(Mapping):  # type: ignore[type-arg]
    def __init__(self, parts):  # Lightning makes it anew of what it moved
        self.parts = dict(parts)

    def __getitem__(self, name):
        return self.parts[name]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


batches("mapping of its own", collate=lambda s: Frozen(zip("xy", stacked(s), strict=True)))(
    lambda m, batch: squared(m, batch["x"], batch["y"])
)
batches("UserDict", collate=lambda s: collections.UserDict(zip("xy", stacked(s), strict=True)))(
    lambda m, batch: squared(m, batch["x"], batch["y"])
)
batches("OrderedDict", collate=lambda s: collections.OrderedDict(zip("xy", stacked(s), strict=True)), exact=True)(
    lambda m, batch: squared(m, batch["x"], batch["y"])
)
batches("list of dicts", collate=lambda s: [{"x": x, "y": y} for x, y in s], exact=True)(
    lambda m, batch: squared(m, torch.stack([one["x"] for one in batch]), torch.stack([one["y"] for one in batch]))
)
batches("list of tuples", collate=list, exact=True)(lambda m, batch: squared(m, *stacked(batch)))
batches("lists of tensors of all lengths", collate=lambda s: tuple(zip(*s, strict=True)))(
    lambda m, batch: squared(m, torch.stack(list(batch[0])), torch.stack(list(batch[1])))
)
batches("nested", collate=lambda s: {"in": {"x": [stacked(s)[0]]}, "out": (stacked(s)[1], {"again": stacked(s)[1]})})(
    lambda m, batch: (
        squared(m, batch["in"]["x"][0], batch["out"][0])
        + 0.1 * squared(m, batch["in"]["x"][0], batch["out"][1]["again"])
    )
)


@batches("scalars beside", collate=lambda s: (*stacked(s), 0.5, torch.tensor(2.0)), exact=True)
def with_scalars(m, batch):
    x, y, factor, other = batch
    return squared(m, x, y) * factor * other


batches(
    "strings and None beside", collate=lambda s: {"x": stacked(s)[0], "y": stacked(s)[1], "what": "train", "no": None}
)(lambda m, batch: squared(m, batch["x"], batch["y"]))


@batches(
    "names of samples beside",
    collate=lambda s: {"x": stacked(s)[0], "y": stacked(s)[1], "ids": [f"{i}" for i in range(len(s))]},
)
def with_names(m, batch):
    assert len(batch["ids"]) == len(batch["x"])
    return squared(m, batch["x"], batch["y"])


@batches("length beside", collate=lambda s: (*stacked(s), len(s)))
def with_length(m, batch):
    x, y, length = batch
    return (m.net(x) - y).square().mean(-1).sum() / length


@batches("numpy beside", collate=lambda s: (*stacked(s), np.arange(len(s))))
def with_numpy(m, batch):
    x, y, ids = batch
    assert len(ids) == len(x)
    return squared(m, x, y)


@batches("prototypes beside", collate=lambda s: (*stacked(s), drawn(21, 5, 6)))
def with_prototypes(m, batch):
    x, y, prototypes = batch
    return squared(m, x, y) + 0.1 * m.net(prototypes).square().mean()


@batches("prototypes as many as samples", collate=lambda s: (*stacked(s), drawn(21, 8, 6)))
def with_eight_prototypes(m, batch):
    x, y, prototypes = batch
    near = torch.cdist(m.net(x), m.net(prototypes)).min(-1).values
    return squared(m, x, y) + 0.1 * near.mean()


batches("empty parts", collate=lambda s: {"x": stacked(s)[0], "y": stacked(s)[1], "more": {}, "none": []})(
    lambda m, batch: squared(m, batch["x"], batch["y"])
)


# --- where the samples are not the first dimension ----------------------------------------------------------------


def in_time(width: int) -> Callable[[Any], Any]:
    """Samples as sequences of ``width`` steps, time first."""

    def collate(samples):
        x, y = stacked(samples)
        steps = torch.arange(1, width + 1)[:, None, None] / width
        return x[None] * steps, y[None] * steps

    return collate


@batches("time first, as many steps as samples", REPORT, FIT, MICRO, TIGHT, collate=in_time(8))
def time_first_square(m, batch):
    x, y = batch
    out = torch.tanh(torch.cumsum(m.net(x), 0))
    return F.mse_loss(out, y)


@batches("time first", collate=in_time(5))
def time_first(m, batch):
    x, y = batch
    return F.mse_loss(torch.tanh(torch.cumsum(m.net(x), 0)), y)


@batches("time first beside batch first", collate=lambda s: (in_time(8)(s)[0], stacked(s)[1]))
def time_first_inputs(m, batch):
    x, y = batch
    return F.mse_loss(m.net(x).cumsum(0)[-1], y)


@batches("views of samples stacked", collate=lambda s: (torch.cat([stacked(s)[0]] * 2), stacked(s)[1]))
def two_views(m, batch):
    x, y = batch
    one, two = m.net(x).chunk(2)
    return F.mse_loss(one, y) + F.mse_loss(two, y)


@batches(
    "views of samples in a list", collate=lambda s: ([stacked(s)[0], 0.5 * stacked(s)[0]], stacked(s)[1]), exact=True
)
def views(m, batch):
    (one, two), y = batch
    return squared(m, one, y) + squared(m, two, y)


@batches("views first", collate=lambda s: (torch.stack([stacked(s)[0], 0.5 * stacked(s)[0]]), stacked(s)[1]))
def views_first(m, batch):
    (one, two), y = batch
    return squared(m, one, y) + squared(m, two, y)


@batches(
    "padded to the longest",
    collate=lambda s: (pad_sequence([x[: 2 + i % 5] for i, (x, _) in enumerate(s)], True), stacked(s)[1]),
)
def padded(m, batch):
    x, y = batch
    return F.mse_loss(m.net(F.pad(x, (0, 6 - x.shape[1]))), y)


@batches("lengths beside", collate=lambda s: (*stacked(s), torch.tensor([2 + i % 3 for i in range(len(s))])))
def lengths(m, batch):
    x, y, steps = batch
    packed = pack_padded_sequence(x[:, :, None].expand(-1, -1, 6), steps, batch_first=True, enforce_sorted=False)
    return F.mse_loss(m.net(packed.data).mean(0), y.mean(0))


@batches(
    "packed sequence",
    collate=lambda s: (pack_padded_sequence(stacked(s)[0][:, :, None], torch.full((len(s),), 6), True), stacked(s)[1]),
)
def packed(m, batch):
    x, y = batch
    return m.net(x.data.expand(-1, 6)).square().mean() + y.mean() * 0


@batches(
    "nodes of graphs",
    collate=lambda s: (
        torch.cat([x.expand(2 + i % 3, -1) for i, (x, _) in enumerate(s)]),
        torch.cat([torch.full((2 + i % 3,), i) for i in range(len(s))]),
        torch.stack([y for _, y in s]),
    ),
)
def graphs(m, batch):
    nodes, owner, y = batch
    out = torch.zeros(len(y), 4).index_add(0, owner, m.net(nodes))
    return F.mse_loss(out, y)


@batches("rows of a sparse matrix", collate=lambda s: (stacked(s)[0].to_sparse(), stacked(s)[1]))
def sparse(m, batch):
    x, y = batch
    return squared(m, x.to_dense(), y)


# --- pictures -------------------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, samples: int = 12, side: int = 6):
        self.pictures = drawn(31, samples, 3, side, side)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.pictures[index].mean((1, 2))


def picture_loss(m, x, y):
    return F.mse_loss(m.net(x.flatten(1)[:, :6])[:, :3] * x.mean((1, 2, 3))[:, None], y)


batches("three pictures of three channels", data=Pictures, size=3, micro=1, exact=True)(
    lambda m, batch: picture_loss(m, *batch)
)
batches(
    "list of three pictures of three channels",
    data=Pictures,
    size=3,
    micro=1,
    collate=lambda s: ([x for x, _ in s], torch.stack([y for _, y in s])),
    exact=True,
)(lambda m, batch: picture_loss(m, torch.stack(batch[0]), batch[1]))
batches("six pictures in thirds", data=Pictures, size=6, micro=2, exact=True)(lambda m, batch: picture_loss(m, *batch))
batches(
    "channels last",
    data=lambda: Pictures(16),
    size=8,
    collate=lambda s: tuple(
        part.contiguous(memory_format=torch.channels_last) if part.ndim == 4 else part for part in stacked(s)
    ),
    exact=True,
)(lambda m, batch: picture_loss(m, *batch))
batches(
    "whole numbers and booleans",
    collate=lambda s: {"x": (stacked(s)[0] > 0), "n": stacked(s)[1].long(), "y": stacked(s)[1]},
    exact=True,
)(
    lambda m, batch: (
        squared(m, batch["x"].float(), batch["y"]) + 0.01 * batch["n"].float().mean() * m.net.last.bias.sum()
    )
)
batches("double precision", collate=lambda s: tuple(part.double() for part in stacked(s)), exact=True)(
    lambda m, batch: squared(m, batch[0].float(), batch[1].float())
)


@batches("a batch of one", REPORT, FIT, size=1)
def one(m, batch):
    return squared(m, *batch)


batches("fields of unequal kinds", data=lambda: Rows("x", "y", "label", "mask", "weight"), exact=True)(
    lambda m, batch: squared(m, batch["x"], batch["y"]) + 0.1 * F.cross_entropy(m.net(batch["x"]), batch["label"])
)


@batches("halves cut by the step itself")
def own_halves(m, batch):
    x, y = batch
    return sum(F.mse_loss(m.net(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)) / 2


@batches("a half computed by another function")
def half_by_another(m, batch):
    one, two = batch[0].chunk(2)
    return F.mse_loss(torch.cat([m.net(one), m.net(two).tanh()]), batch[1])


@batches("a half without its values, in place")
def half_without(m, batch):
    x = batch[0].clone()
    x[: len(x) // 2] = 0
    return squared(m, x, batch[1])


@batches("a prior of as many copies as samples")
def copies(m, batch):
    prior = m.net.first.bias.expand(len(batch[0]), -1)
    return squared(m, *batch) + 0.1 * prior.square().sum()


@batches("first half against second half")
def halves(m, batch):
    x, y = batch
    half = len(x) // 2
    return squared(m, x, y) + 0.3 * (m.net(x[:half]).mean(0) - m.net(x[half:]).mean(0)).square().sum()


@batches("neighbours of every sample beside", collate=lambda s: (*stacked(s), torch.eye(len(s)).roll(1, 0)))
def with_neighbours(m, batch):
    x, y, neighbours = batch
    return squared(m, x + 0.1 * neighbours @ x, y)


@batches("order of the samples beside", collate=lambda s: (*stacked(s), torch.arange(len(s)).flip(0)))
def with_order(m, batch):
    x, y, order = batch
    return squared(m, x + 0.1 * x[order], y)


@batches("pairs of samples beside", collate=lambda s: (*stacked(s), torch.arange(2 * (len(s) // 2)).view(2, -1)))
def with_pairs(m, batch):
    x, y, (one, other) = batch
    return squared(m, x, y) + 0.1 * (m.net(x)[one] - m.net(x)[other]).square().mean()


@batches("every sample added to the next, in place")
def shifted_in_place(m, batch):
    x, y = batch[0].clone(), batch[1]
    x[1:] += 0.5 * x[:-1]
    return squared(m, x, y)


batches("normalised over the batch")(lambda m, batch: squared(m, F.normalize(batch[0], dim=0), batch[1]))
batches("shares of the batch")(lambda m, batch: squared(m, batch[0].softmax(0), batch[1]))
batches("standardised by a function")(
    lambda m, batch: squared(m, F.batch_norm(batch[0], None, None, training=True), batch[1])
)


@batches("features standardised by a function")
def features_by_function(m, batch):
    hidden = F.batch_norm(torch.tanh(m.net.first(batch[0])), None, None, training=True)
    return F.mse_loss(m.net.last(hidden), batch[1])


batches("the sample before beside every sample")(
    lambda m, batch: squared(m, batch[0] + 0.5 * F.pad(batch[0], (0, 0, 1, 0))[:-1], batch[1])
)
batches("transformed over the batch")(lambda m, batch: squared(m, torch.fft.fft(batch[0], dim=0).real, batch[1]))
batches("samples one by one", exact=True)(
    lambda m, batch: squared(m, torch.stack([x - x.mean() for x in batch[0]]), batch[1])
)
