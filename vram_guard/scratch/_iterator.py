"""The dimensions of a reduction as the kernel sees them, after TensorIterator has put them in order and joined them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Dimension(NamedTuple):
    """One dimension of the input; strides count elements."""

    size: int
    stride: int
    out_stride: int
    """In the result; 0: reduced."""


def reduced_iterator(shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]) -> list[Dimension]:
    """The dimensions from the innermost on, the reduced ones first (TensorIterator.cpp).

    ``reorder_dimensions`` sorts by the result's strides, whether reduced or not, then by the input's;
    ``coalesce_dimensions`` joins what lies in memory without a gap in both.

    Args:
        shape: of the input.
        strides: of the input, in elements.
        reduced: the dimensions that are reduced.
    """
    dimensions: list[Dimension] = []
    out_stride = 1
    for dim in reversed(range(len(shape))):
        kept = dim not in reduced
        dimensions.append(Dimension(shape[dim], strides[dim], out_stride if kept else 0))
        out_stride *= shape[dim] if kept else 1
    return _joined(_in_order(dimensions))


def _in_order(dimensions: list[Dimension]) -> list[Dimension]:
    """Insertion sort as torch does it: comparisons may be ambiguous, and then nothing moves past."""
    for start in range(1, len(dimensions)):
        moving = start
        for before in range(start - 1, -1, -1):
            order = _compare(dimensions[before], dimensions[moving])
            if order < 0:
                break
            if order > 0:
                dimensions[before], dimensions[moving] = dimensions[moving], dimensions[before]
                moving = before
    return dimensions


def _compare(one: Dimension, other: Dimension) -> int:
    """``should_swap``: above 0 where the two must change places, 0 where it does not matter."""
    if (one.out_stride == 0) != (other.out_stride == 0):
        return 1 if other.out_stride == 0 else -1
    for mine, its in ((one.out_stride, other.out_stride), (one.stride, other.stride)):
        if mine == 0 or its == 0:
            continue
        if mine != its:
            return 1 if mine > its else -1
        if one.size > other.size:
            return 1
    return 0


def _joined(dimensions: list[Dimension]) -> list[Dimension]:
    """``coalesce_dimensions``."""
    made = dimensions[:1]
    for each in dimensions[1:]:
        last = made[-1]
        gapless = (last.size * last.stride, last.size * last.out_stride) == (each.stride, each.out_stride)
        if last.size == 1:
            made[-1] = each
        elif each.size != 1:
            if gapless:
                made[-1] = last._replace(size=last.size * each.size)
            else:
                made.append(each)
    return made
