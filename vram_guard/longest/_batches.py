"""Batches that a sampler can make, and a handful of them one of which takes the most memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vram_guard.capture.loader import Reading
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import BATCHES_COMPARED, EPOCHS_FOLLOWED
from vram_guard.longest._sizes import Sizes


def batches_of(
    part: Reading, size: int, sizes: Sizes, ranks: int = 1, *, by_batches: bool, seconds: float
) -> tuple[list[torch.Tensor], str]:
    """The batches of a loader whose data set has an index, as numbers of samples, and what is not known about them.

    Where any samples may come together: the largest that can.

    Args:
        part: the loader.
        size: samples in a batch, where its sampler does not decide that.
        sizes: of all samples.
        ranks: processes among which the framework is going to share the samples out.
        by_batches: whole batches are shared out, as Accelerate does, and not sample by sample.
        seconds: that drawing from samplers with batches of their own may take; 0: they are not drawn from.

    Raises:
        UnsupportedStepError: the sampler has batches of its own, and is not drawn from.
    """
    batches, count = part.loader.batch_sampler, len(sizes.values)
    sampler: Any = getattr(batches, "sampler", None)
    if not isinstance(batches, BatchSampler) or type(batches).__iter__ is not BatchSampler.__iter__:
        return _of_own_batches(batches, count, seconds)
    kind = type(sampler)
    listed = isinstance(sampler, (list, tuple, range))
    if listed or kind is SequentialSampler or (kind is DistributedSampler and not sampler.shuffle):
        order = torch.tensor(sampler) if listed else torch.arange(count)
        ranks = getattr(sampler, "num_replicas", ranks)
        return _in_order(order, size, ranks, drops=bool(batches.drop_last), by_batches=by_batches), ""
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    samples = torch.as_tensor(sampler.indices) if kind is SubsetRandomSampler else torch.arange(count)
    repeats = size if kind in random and getattr(sampler, "replacement", False) else 1
    if part.endless or (kind is RandomSampler and sampler.num_samples > count):
        repeats = max(repeats, 2 + size // count)  # a batch may be of two rounds
    size = min(size, len(samples) * repeats)
    said = _("the order of {sampler} is not known: any samples are taken together, each once", sampler=kind.__name__)
    return _largest(samples, size, repeats, sizes), "" if kind in random else said


def _largest(samples: torch.Tensor, size: int, repeats: int, sizes: Sizes) -> list[torch.Tensor]:
    """The largest batches: in each measure, in the product, and with the largest in each together.

    Args:
        samples: of which any may come together.
        size: of a batch.
        repeats: times that one of them may be in the same batch.
        sizes: of all samples.
    """
    values, areas = sizes.values[samples], sizes.areas[samples]
    most = min(len(values), size + values.shape[1])
    rankings = [column.topk(most).indices for column in (areas, *values.unbind(1))]
    mixed = torch.cat([torch.stack([ranking[0] for ranking in rankings[1:]]), rankings[0]])
    rankings.insert(0, torch.tensor(list(dict.fromkeys(mixed.tolist()))))
    return [samples[one.repeat_interleave(repeats)[:size]] for one in rankings]


def _in_order(order: torch.Tensor, size: int, ranks: int, *, drops: bool, by_batches: bool) -> list[torch.Tensor]:
    """The same batches in every epoch, those of all ranks."""
    step = size * ranks if by_batches else ranks
    # The first samples again, so that every process has as many.
    evened = order[torch.arange(-(-len(order) // step) * step) % max(1, len(order))]
    if by_batches:
        shares = [order if drops or ranks == 1 else evened]
    else:
        shares = [evened[rank::ranks] for rank in range(ranks)]
    return [part for share in shares for part in share.split(size) if len(part) == size or not drops]


def _of_own_batches(sampler: Any, count: int, seconds: float) -> tuple[list[torch.Tensor], str]:
    name = type(sampler).__name__
    if isinstance(sampler, (list, tuple)):
        return [torch.tensor(list(one), dtype=torch.int64) for one in sampler if len(one)], ""
    if not seconds:
        raise UnsupportedStepError(_("{sampler} makes batches of its own, and cannot be copied here", sampler=name))
    end = time.monotonic() + seconds
    made: list[torch.Tensor] = []
    for epoch in range(EPOCHS_FOLLOWED):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        for one in islice(iter(sampler), count):
            if len(one):
                made.append(torch.tensor(list(one), dtype=torch.int64))
            if time.monotonic() > end:
                break
    if not made:
        raise UnsupportedStepError(_("the batch sampler {kind} delivers no batch", kind=name))
    return made, _("{sampler} made {count} batches, and may make others", sampler=name, count=len(made))


def candidates(batches: list[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
    """Batches one of which is planned for: each the largest in one way, the likeliest first.

    Args:
        batches: that can be.
        sizes: of all samples.

    Returns:
        The largest sample is the first in each.
    """
    scores = _scores(batches, sizes)
    best = [(score == score.max()).nonzero().flatten() for score in scores]
    chosen = [_sorted(batches[int(numbers[scores[0][numbers].argmax()])], sizes) for numbers in best]
    different = dict.fromkeys(tuple(batch.tolist()) for batch in chosen)  # sorted alike, where they are the same
    return [torch.tensor(batch) for batch in different][:BATCHES_COMPARED]


def _scores(batches: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
    """Each of the ways in which one batch may be the largest: padded, in attention, by its samples' numbers, ..."""
    flat = torch.cat(list(batches))
    samples = torch.tensor([len(batch) for batch in batches])
    owner = torch.arange(len(batches)).repeat_interleave(samples)
    rows, areas = sizes.values[flat].clamp(min=0).double(), sizes.areas[flat]
    nothing = torch.zeros(len(batches), rows.shape[1], dtype=torch.float64)
    largest = nothing.scatter_reduce(0, owner[:, None].expand_as(rows), rows, "amax")
    plane = largest.clamp(min=1).prod(1)
    sums = [nothing[:, 0].index_add(0, owner, one) for one in (areas, areas**2, *rows.unbind(1))]
    return [samples * plane, samples * plane**2, *sums, *largest.unbind(1), samples.double()]


def _sorted(batch: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The largest sample first, then the largest of each measure: of a part of a batch, the first samples count."""
    values = sizes.values[batch].clamp(min=0)
    by_area = sizes.areas[batch].argsort(descending=True, stable=True)
    tops = [column.argsort(descending=True, stable=True)[0] for column in values.unbind(1)]
    return batch[torch.tensor(list(dict.fromkeys(int(one) for one in [by_area[0], *tops, *by_area])))]
