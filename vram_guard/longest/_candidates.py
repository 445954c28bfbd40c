"""From sizes of samples and possible batches to a handful of batches, one of which takes the most memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vram_guard.longest._orders import EPOCHS, Orders, Pool

#: Batches that are compared by tracing at most.
MOST = 6

#: Samples of an epoch whose batches are drawn, to find a share of them.
_MOST_DRAWN = 200_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of samples.

    Attributes:
        names: of the measures.
        values: samples x measures; -1 where it is not known.
    """

    names: tuple[str, ...]
    values: torch.Tensor

    @property
    def known(self) -> torch.Tensor:
        """Numbers of the samples whose sizes are known."""
        return (self.values >= 0).all(dim=1).nonzero().flatten()

    def distinct(self) -> Sizes:
        """Without measures that are the same for all samples, or as another."""
        rows = self.values[self.known]
        kept: list[int] = []
        for k in range(len(self.names)):
            column = rows[:, k]
            if (column != column[:1]).any() and not any(torch.equal(column, rows[:, one]) for one in kept):
                kept.append(k)
        return Sizes(tuple(self.names[k] for k in kept), self.values[:, kept])


@dataclass(frozen=True)
class _Scores:
    """Measures of many batches: samples, largest sample by measure, sums by measure."""

    samples: torch.Tensor
    largest: torch.Tensor
    sums: torch.Tensor
    products: torch.Tensor
    """Sums of the products of a sample's measures."""
    squares: torch.Tensor
    """Sums of their squares."""

    @classmethod
    def of(cls, batches: Sequence[torch.Tensor], sizes: Sizes) -> _Scores:
        flat = torch.cat(list(batches))
        lengths = torch.tensor([len(batch) for batch in batches])
        owner = torch.arange(len(batches)).repeat_interleave(lengths)
        rows = sizes.values[flat].clamp(min=0).double()
        wide = owner[:, None].expand_as(rows)
        nothing = torch.zeros(len(batches), rows.shape[1], dtype=torch.float64)
        products = rows.clamp(min=1).prod(1)
        none = torch.zeros(len(batches), dtype=torch.float64)
        return cls(
            lengths.double(),
            nothing.scatter_reduce(0, wide, rows, "amax"),
            nothing.scatter_add(0, wide, rows),
            none.scatter_add(0, owner, products),
            none.scatter_add(0, owner, products**2),
        )

    @property
    def padded(self) -> torch.Tensor:
        """Numbers of a batch whose samples are padded to the largest, in each measure."""
        return self.samples * self.largest.clamp(min=1).prod(1)

    def orders(self) -> Iterator[torch.Tensor]:
        """Each of the ways in which one batch may be the largest, as a score."""
        yield self.padded
        yield self.padded * self.largest.clamp(min=1).prod(1)  # attention
        yield self.products
        yield self.squares
        yield from self.sums.unbind(1)
        yield from self.largest.unbind(1)
        yield self.samples


def candidates(orders: Orders, sizes: Sizes, quantile: float | None = None) -> tuple[list[torch.Tensor], int]:
    """Batches one of which is planned for, the largest sample first in each, and how many were looked at for it.

    Args:
        orders: of the samples.
        sizes: of all samples.
        quantile: None: several, each the largest in one way, the likeliest first. A share: the batch than which this
            share of the batches of some epochs is no larger, where batches are known.
    """
    if quantile is None or not (orders.made or orders.pools):
        return _largest(orders, sizes), 0
    batch, looked_at = _at_quantile(orders, sizes, quantile)
    return [batch], looked_at


def _largest(orders: Orders, sizes: Sizes) -> list[torch.Tensor]:
    batches = [*orders.made, *(one for pool in orders.pools for one in _of_pool(pool, sizes))]
    if orders.made and (orders.kind == "drawn" or orders.budget is not None):
        batches += _of_budget(orders, sizes)
    if not batches:
        return []
    scores = _Scores.of(batches, sizes)
    chosen = []
    for score in scores.orders():
        best = (score == score.max()).nonzero().flatten()
        chosen.append(int(best[scores.padded[best].argmax()]))
    return _different([_sorted(batches[number], sizes) for number in chosen])


def _at_quantile(orders: Orders, sizes: Sizes, share: float) -> tuple[torch.Tensor, int]:
    made = orders.made if orders.made and not (orders.pools and orders.kind == "exact") else list(_drawn(orders.pools))
    scores = _Scores.of(made, sizes)
    by_products = scores.products.argsort(stable=True)
    by_size = by_products[scores.padded[by_products].argsort(stable=True)]
    return _sorted(made[int(by_size[math.ceil(share * len(made)) - 1])], sizes), len(made)


def share_as_long(batch: torch.Tensor, orders: Orders, sizes: Sizes) -> int:
    """Batches of an epoch that can have a sample as large as the largest of this one, at most."""
    samples = sizes.values[batch].clamp(min=1).double().prod(1)
    everything = sizes.values.clamp(min=1).double().prod(1)
    if orders.pools:
        return min(orders.per_epoch, int((everything >= samples.max()).sum()))
    padded = _Scores.of([*orders.made, batch], sizes).padded
    epochs = max(1, round(len(orders.made) / max(1, orders.per_epoch)))
    return min(orders.per_epoch, max(1, -(-int((padded[:-1] >= padded[-1]).sum()) // epochs)))


def _of_pool(pool: Pool, sizes: Sizes) -> Iterator[torch.Tensor]:
    """The largest that a pool can give: in each measure, in the product, and with the largest in each together."""
    values = sizes.values[pool.samples]
    most = min(len(values), pool.size + values.shape[1])
    by_product = values.clamp(min=1).double().prod(1).topk(most).indices
    rankings = [by_product, *(column.topk(most).indices for column in values.unbind(1))]
    tops = [ranking[0] for ranking in rankings[1:]]
    mixed = torch.cat([torch.stack(tops), by_product])
    seen: dict[int, None] = dict.fromkeys(mixed.tolist())  # in order, each once
    for ranking in [torch.tensor(list(seen)), *rankings]:
        yield pool.samples[ranking.repeat_interleave(pool.repeats)[: pool.size]]


def _of_budget(orders: Orders, sizes: Sizes) -> Iterator[torch.Tensor]:
    """Batches that a sampler with a budget makes of the samples in order of length, each as full as it may be."""
    scores = _Scores.of(orders.made, sizes)
    lengths = sizes.values.clamp(min=1).double().prod(1)
    known = sizes.known
    order = known[lengths[known].argsort()]
    sorted_lengths = lengths[order]
    budget = float(scores.padded.max() if orders.budget is None else orders.budget)
    places = torch.arange(1, len(order) + 1)
    most = torch.minimum(places, scores.samples.max().long())
    if orders.budget is None or bool((scores.padded <= budget).all()):
        counts = torch.minimum((budget // sorted_lengths).long(), most)
    else:  # of the samples themselves, without padding
        ends = sorted_lengths.cumsum(0)
        starts = torch.searchsorted(torch.cat([torch.zeros(1).double(), ends]), ends - budget)
        counts = torch.minimum(places - starts, most)
    counts = counts.clamp(min=1)
    for score in (counts * sorted_lengths, counts * sorted_lengths**2, sorted_lengths, counts):
        end = int((score == score.max()).nonzero()[-1])
        yield order[end + 1 - int(counts[end]) : end + 1]


def _drawn(pools: Sequence[Pool]) -> Iterator[torch.Tensor]:
    """Batches of some epochs, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    for _epoch in range(EPOCHS):
        for pool in pools:
            order = torch.randperm(len(pool.samples), generator=generator)[:_MOST_DRAWN]
            yield from pool.samples[order].split(pool.size)


def _sorted(batch: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The largest sample first, then the largest of each measure: of a part of a batch, the first samples count."""
    values = sizes.values[batch].clamp(min=0)
    by_product = _descending(values.clamp(min=1).double().prod(1))
    tops = [by_product[0], *(_descending(column)[0] for column in values.unbind(1))]
    numbers = list(dict.fromkeys(int(one) for one in [*tops, *by_product]))
    return batch[torch.tensor(numbers)]


def _descending(values: torch.Tensor) -> torch.Tensor:
    return values.argsort(descending=True, stable=True)


def _different(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = {tuple(sorted(batch.tolist())): batch for batch in reversed(batches)}
    return list(reversed(found.values()))[:MOST]
