"""Samples for a proof of micro-batches: the largest of a data set in one half of them, small ones in the other.

A step that pads its batch itself pads a micro-batch less than the whole batch. That shows only where one half of the
samples is smaller than the other: of samples drawn at random, most often none is one of the rare large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from vram_guard.limits import EXTREMES_KEPT, SIZES_KEPT

T = TypeVar("T")


class SampleSizes(NamedTuple):
    """Sizes of samples, by their numbers in the data set."""

    numbers: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    """One row for each, of the same measures."""

    def apart(self, count: int, preferred: Sequence[int]) -> list[int]:
        """Numbers of so many samples, see :func:`apart`.

        Args:
            count: of samples.
            preferred: numbers of samples that are taken where their sizes do as well as others.
        """
        places = {number: place for place, number in enumerate(self.numbers)}
        rows = [places[number] for number in dict.fromkeys(preferred) if number in places]
        return [self.numbers[row] for row in apart(self.values, count, rows)]


def kept_sizes(numbers: torch.Tensor, values: torch.Tensor) -> SampleSizes:
    """Sizes of these samples (samples x measures), or of enough of them."""
    if len(numbers) > SIZES_KEPT:
        some = torch.linspace(0, len(numbers) - 1, SIZES_KEPT // 2).long()
        measures = [*values.unbind(1), values.clamp(min=1).double().prod(1)]
        ends = [one.topk(EXTREMES_KEPT, largest=largest).indices for one in measures for largest in (True, False)]
        rows = torch.cat([some, *ends]).unique()
        numbers, values = numbers[rows], values[rows]
    return SampleSizes(tuple(numbers.tolist()), tuple(map(tuple, values.tolist())))


def apart(values: Sequence[Sequence[int]], count: int, preferred: Sequence[int] = ()) -> list[int]:
    """Rows of so many samples: the first half as large as can be, the second half smaller, in each measure if it can.

    A half is as large as its largest sample, in each measure by itself: as its batch is padded.

    Args:
        values: sizes, a row for each sample.
        count: of samples; an odd one is in the first half.
        preferred: rows that are taken where others do no better.

    Example:
        >>> apart([[64], [64], [96], [64], [32]], 4, [0, 1, 3])
        [2, 1, 4, 3]
        >>> apart([[64, 48], [48, 64], [64, 48], [48, 64]], 4, [0, 1, 2, 3])  # upright pictures and others
        [0, 1, 2, 2]
    """
    sizes = torch.tensor([list(row) for row in values], dtype=torch.float64).clamp(min=0)
    half = -(-count // 2)
    rows = range(len(sizes))
    chosen = _largest(sizes, list(dict.fromkeys([*preferred, *rows])), half)
    return chosen + _smaller(sizes, list(dict.fromkeys([*preferred[half:], *preferred, *rows])), chosen, count - half)


def _largest(sizes: torch.Tensor, order: list[int], count: int) -> list[int]:
    """Together as large as can be; where one more makes them no larger, the next of the order."""
    scale = sizes.amax(0).clamp(min=1)
    top = torch.zeros_like(scale)
    chosen: list[int] = []
    for slot in range(count):
        free = _free(order, chosen)
        reached = (torch.maximum(sizes[free], top) / scale).sum(1)
        best = int(reached.argmax())
        grows = bool(reached[best] > (top / scale).sum())
        chosen.append(_first(free, reached == reached[best]) if grows else free[slot % len(free)])
        top = torch.maximum(top, sizes[chosen[-1]])
    return chosen


def _smaller(sizes: torch.Tensor, order: list[int], large: list[int], count: int) -> list[int]:
    """Together smaller than these in as many measures as can be, and there as small as can be."""
    top = sizes[large].amax(0).clamp(min=1)
    low = torch.zeros_like(top)
    chosen: list[int] = []
    for _slot in range(count):
        free = _free(order, large + chosen)
        joint = torch.maximum(sizes[free], low)
        as_large = (joint >= top).sum(1)
        if chosen and int(as_large.min()) > int((low >= top).sum()):
            chosen.append(chosen[-1])  # rather twice the same than as large as the others
            continue
        small = (joint / top).sum(1).masked_fill(as_large > as_large.min(), torch.inf)
        chosen.append(_first(free, small == small.min()))
        low = torch.maximum(low, sizes[chosen[-1]])
    return chosen


def _free(order: list[int], taken: list[int]) -> list[int]:
    """Rows that are not taken yet; all of them where there are no others."""
    return [row for row in order if row not in taken] or order


def _first(rows: list[int], which: torch.Tensor) -> int:
    return rows[int(which.nonzero()[0])]


def arranged(samples: Sequence[T], count: int) -> list[T]:
    """So many of these samples, see :func:`apart`; the first ones, in order, where all are alike.

    Example:
        >>> [len(one) for one in arranged([torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2)], 4)]
        [3, 2, 2, 2]
    """
    shapes = [leaf_shapes(sample) for sample in samples]
    if len(set(shapes)) <= 1:
        return list(samples[:count])
    rows = [[extent for shape in each for extent in shape] for each in shapes]
    if len({tuple(map(len, each)) for each in shapes}) > 1:  # lists of different lengths: nothing to compare one by one
        rows = [[elements(sample)] for sample in samples]
    return [samples[row] for row in apart(rows, count, range(min(count, len(samples))))]


def leaf_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of all tensors and arrays of a sample or a batch."""
    from vram_guard.simulate.tracing.batches import leaves_of

    return tuple(tuple(leaf.shape) for leaf in leaves_of(batch) if hasattr(leaf, "shape"))


def elements(sample: Any) -> int:
    """Numbers in a sample."""
    from vram_guard.simulate.tracing.batches import leaves_of

    leaves = leaves_of(sample)
    return sum(int(torch.Size(leaf.shape).numel()) if hasattr(leaf, "shape") else 1 for leaf in leaves)
