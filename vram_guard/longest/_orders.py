"""Batches that a sampler can make: those that it makes in every epoch, or samples of which any may come together.

Called in a copy of the process: samplers draw, count and keep what they please.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vram_guard.longest._limit import at_most

#: Epochs that are drawn of a sampler whose class is not known.
EPOCHS = 3

#: Numbers of samples that are drawn at most, and those of a sampler that never ends.
MOST_DRAWN = 2_000_000

#: Attributes with which a sampler bounds a batch by something else than its samples.
BUDGETS = ("max_tokens", "max_tokens_per_batch", "tokens_per_batch", "batch_tokens", "token_budget", "max_length_sum")

#: Ranks whose share of the samples is looked at.
_MOST_RANKS = 64

T = TypeVar("T")

Kind = Literal["exact", "bound", "drawn"]


@dataclass(frozen=True)
class Pool:
    """Samples of which any ``size`` may make a batch."""

    samples: torch.Tensor
    size: int
    repeats: int = 1
    """How often one of them may be in the same batch."""


@dataclass(frozen=True)
class Orders:
    """Batches that a sampler can make.

    Attributes:
        kind: "exact": these batches, or any of a pool, and no others; "bound": of a pool, and every batch takes at
            most as much as the largest that it gives; "drawn": others may be larger.
        made: batches as they were made.
        pools: samples that come together.
        per_epoch: batches in one epoch, on one process.
        budget: the most that a batch's samples may be long together, where the sampler says so; None: it does not.
    """

    kind: Kind
    made: Sequence[torch.Tensor] = ()
    pools: Sequence[Pool] = ()
    per_epoch: int = 0
    budget: int | None = None


def orders_of(loader: Any, size: int, count: int, ranks: int, seconds: float, *, by_batches: bool = False) -> Orders:
    """The batches of a loader whose data set has an index.

    Args:
        loader: a DataLoader.
        size: samples in a batch, where its sampler does not decide that.
        count: of samples.
        ranks: processes among which the framework is going to share the samples out.
        seconds: that drawing may take; 0: nothing is drawn.
        by_batches: whole batches are shared out, as Accelerate does, and not sample by sample.
    """
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    fixed_size = isinstance(getattr(batches, "batch_size", None), int) and sampler is not None
    if fixed_size and type(batches).__iter__ is BatchSampler.__iter__:
        drops = bool(batches.drop_last)
        return _of_indices(sampler, size, count, ranks, seconds, drops=drops, by_batches=by_batches)
    return _of_batches(batches, count, seconds)


# --- samplers of single samples -------------------------------------------------------------------------------


def _of_indices(
    sampler: Any, size: int, count: int, ranks: int, seconds: float, *, drops: bool, by_batches: bool
) -> Orders:
    everything = torch.arange(count)
    kind = type(sampler)
    if kind is SequentialSampler:
        if by_batches:
            made = _cut(everything if drops or ranks == 1 else _evened(count, size * ranks), size, drops=drops)
        else:
            shares = (_evened(count, ranks)[rank::ranks] for rank in range(ranks))
            made = [part for share in shares for part in _cut(share, size, drops=drops)]
        return Orders("exact", made, per_epoch=-(-len(made) // ranks))
    if kind is RandomSampler:
        rounds = min(-(-sampler.num_samples // count), 2 + size // count)  # permutations that one batch can be of
        again = size if sampler.replacement else rounds
        return _together(everything, size, again, sampler.num_samples, ranks, exact=not sampler.replacement)
    if kind is SubsetRandomSampler:
        return _together(torch.as_tensor(sampler.indices), size, 1, len(sampler.indices), ranks)
    if kind is WeightedRandomSampler:
        pool = torch.as_tensor(sampler.weights).nonzero().flatten()
        again = size if sampler.replacement else 1
        return _together(pool, size, again, sampler.num_samples, ranks, exact=not sampler.replacement)
    if kind is DistributedSampler and sampler.shuffle:
        return _together(everything, size, 1, len(sampler), 1)
    drawn = _Drawn(sampler, count)
    drawn.draw(seconds)
    if not drawn.rounds:
        return _together(everything, size, 1, count, ranks, exact=False)
    orders = [torch.tensor(order, dtype=torch.int64) for order in drawn.rounds if order]
    if not orders:
        return Orders("drawn")
    length = len(orders[0])
    if length >= drawn.most:  # it never ends: each round has every sample, and a batch may be of two of them
        return _together(everything, size, 2 + size // max(1, count), count, 1, exact=False)
    if drawn.steady(orders, torch.equal):
        made = [part for order in orders[: drawn.ranks] for part in _cut(order, size, drops=drops)]
        return Orders("exact", made, per_epoch=-(-len(made) // drawn.ranks))
    sets = {frozenset(order.tolist()) for order in orders}
    again = max(int(order.bincount().max()) for order in orders)
    pool = torch.tensor(sorted(next(iter(sets)))) if len(sets) == 1 and len(orders) > 1 else everything
    return _together(pool, size, again, length, 1, exact=False)


def _together(pool: torch.Tensor, size: int, repeats: int, drawn: int, ranks: int, *, exact: bool = True) -> Orders:
    most = min(size, len(pool) * repeats)
    return Orders(
        "exact" if exact else "bound", pools=[Pool(pool, most, repeats)], per_epoch=-(-drawn // (size * ranks))
    )


def _evened(count: int, multiple: int) -> torch.Tensor:
    """All samples in order, and the first ones again, so that every process has as many."""
    return torch.arange(-(-count // multiple) * multiple) % max(1, count)


def _cut(order: torch.Tensor, size: int, *, drops: bool) -> list[torch.Tensor]:
    parts = list(order.split(size))
    return parts[:-1] if drops and parts and len(parts[-1]) < size else parts


class _Drawn:
    """What a sampler yields in some epochs, for every rank where it shares out among several."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self.most = min(MOST_DRAWN, 4 * count + 1)
        """Of one round: nothing that ends yields more."""
        self.rounds: list[list[Any]] = []
        replicas = getattr(sampler, "num_replicas", None) or getattr(sampler, "world_size", None)
        shares = isinstance(replicas, int) and isinstance(getattr(sampler, "rank", None), int)
        self.ranks = min(replicas, _MOST_RANKS) if shares and isinstance(replicas, int) else 1
        self._shares = shares

    def draw(self, seconds: float) -> None:
        """Fill :attr:`rounds`: epoch by epoch, rank by rank, as far as the time suffices."""
        sampler = self._sampler
        with at_most(seconds) as limit:
            for number in range(EPOCHS * self.ranks):
                if self._shares:
                    sampler.rank = number % self.ranks
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(number // self.ranks)
                self.rounds.append([])
                for one in islice(iter(sampler), self.most):
                    self.rounds[-1].append(one)
                    limit.check()

    def steady(self, orders: Sequence[T], equal: Callable[[T, T], bool]) -> bool:
        """True if every epoch was seen and is like the first, rank by rank."""
        ranks = self.ranks
        pairs = zip(orders, orders[ranks:], strict=False)
        return len(orders) == EPOCHS * ranks and all(equal(one, other) for one, other in pairs)


# --- samplers of whole batches --------------------------------------------------------------------------------


def _of_batches(sampler: Any, count: int, seconds: float) -> Orders:
    drawn = _Drawn(sampler, count)
    drawn.draw(seconds)
    epochs = [[torch.tensor(list(one), dtype=torch.int64) for one in batches if len(one)] for batches in drawn.rounds]
    epochs = [batches for batches in epochs if batches]
    if not epochs:
        return Orders("drawn")
    made = [batch for batches in epochs for batch in batches]
    per_epoch = len(epochs[0])
    sets = [{tuple(sorted(batch.tolist())) for batch in batches} for batches in epochs]
    limits = (getattr(sampler, name, None) for name in BUDGETS)
    budget = next((one for one in limits if isinstance(one, int) and not isinstance(one, bool)), None)
    if drawn.steady(sets, lambda one, other: one == other):
        return Orders("exact", made[: sum(map(len, epochs[: drawn.ranks]))], (), per_epoch, budget)
    if budget is None:
        buckets = _buckets(made)
        if all(2 * sizes.count(max(sizes)) >= len(sizes) for _bucket, sizes in buckets):
            pools = [Pool(bucket, max(sizes)) for bucket, sizes in buckets]
            return Orders("bound", made, pools, per_epoch)
    return Orders("drawn", made, (), per_epoch, budget)


def _buckets(made: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[int]]]:
    """Samples that a chain of batches joins, and the sizes of these batches.

    A sampler that draws within buckets never joins two of them; of one bucket, any samples may come together.
    """
    leader: dict[int, int] = {}

    def first(number: int) -> int:
        while leader.setdefault(number, number) != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    batches = [batch.tolist() for batch in made]
    for one, *others in batches:
        for other in others:
            leader[first(other)] = first(one)
    buckets: dict[int, list[int]] = {}
    sizes: dict[int, list[int]] = {}
    for number in list(leader):
        buckets.setdefault(first(number), []).append(number)
    for batch in batches:
        sizes.setdefault(first(batch[0]), []).append(len(batch))
    return [(torch.tensor(bucket), sizes[number]) for number, bucket in buckets.items()]
