"""Buffers of reductions that are spread over thread blocks: ``ATen/native/cuda/Reduce.cuh``.

Where each thread would have to add up 256 values or more and the results alone do not fill the card, a reduction is
divided among thread blocks, which leave their parts in a buffer and count themselves in semaphores. How many blocks
there are depends on the card. Releases from 2.4 to 2.15 decide alike: they differ in how many elements a thread reads
at a time, which matters only where so few are reduced that nothing is spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from vram_guard.scratch._card import Card, threads_per_multiprocessor

#: ``mnt_wrapper``: threads of a block at most, of complex doubles half as many.
_THREADS, _THREADS_COMPLEX_DOUBLE = 512, 256
_WARP = 32

#: ``min_values_per_thread`` and ``max_values_per_thread``.
_FEWEST, _MOST = 16, 256

#: ``can_use_32bit_indexing``: larger iterators are halved until each half is within it.
_LARGEST_OFFSET = 2**31 - 1

Part = Literal["buffer", "semaphores", "accumulator"]


@dataclass(frozen=True)
class Reduction:
    """One temporary of a reduction; asked with its offset, then the sizes, then the strides of its dimensions.

    Attributes:
        part: "buffer" and "semaphores" of a reduction that is spread over blocks; "accumulator": of one that is halved
            and cannot gather in its result, which is of half precision.
        reduced: the number of dimensions that are reduced, which come first.
        element: bytes of an element of the input.
        accumulated: bytes in which a thread gathers (``arg_t``): of (value, index) 16, of Welford's sums 16.
    """

    part: Part
    reduced: int
    element: int
    accumulated: int

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        """Bytes of this part; 0 where there is none."""
        return _bytes(self, numbers, card)


@lru_cache(maxsize=4096)
def _bytes(rule: Reduction, numbers: tuple[int, ...], card: Card) -> int:
    count = len(numbers) // 2
    sizes, strides = list(numbers[1 : 1 + count]), numbers[1 + count :]
    if not sizes or 0 in sizes:
        return 0
    whole = prod(sizes[rule.reduced :])
    halved = False
    while prod(sizes) > _LARGEST_OFFSET or _last_byte(sizes, strides, rule.element) > _LARGEST_OFFSET:
        extents = [(size - 1) * abs(stride) for size, stride in zip(sizes, strides, strict=True)]
        largest = max(reversed(range(count)), key=extents.__getitem__)
        sizes[largest] -= sizes[largest] // 2
        halved = True
    if rule.part == "accumulator":
        return whole * rule.accumulated if halved else 0
    return _spread(rule, numbers[0], sizes, strides, card)


def _last_byte(sizes: list[int], strides: tuple[int, ...], element: int) -> int:
    return 1 + element * sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _spread(rule: Reduction, offset: int, sizes: list[int], strides: tuple[int, ...], card: Card) -> int:
    """``setReduceConfig``."""
    outputs = prod(sizes[rule.reduced :])
    inputs = prod(sizes[: rule.reduced])
    inner = rule.reduced == len(sizes) or (rule.reduced > 0 and strides[0] < strides[rule.reduced])
    fastest = strides[0] if inner else strides[rule.reduced]
    wide, high = (inputs, outputs) if inner else (outputs, inputs)
    written_at_once = 1
    if fastest == 1 and not inner:
        others = [stride for dim, stride in enumerate(strides) if dim != rule.reduced]
        written_at_once = _divisor_of(offset, sizes[rule.reduced], *others)
        wide //= written_at_once
    most = (_THREADS_COMPLEX_DOUBLE if rule.element == 16 else _THREADS) // written_at_once
    width, height = (_power_of_two(min(size, most)) for size in (wide, high))
    block_height = min(height, most // min(width, _WARP))
    block_width = min(width, most // block_height)
    values = _up(inputs, block_width) if inner else inputs
    if values < min(block_height * 16, _MOST):
        return 0
    values = _up(values, block_height)
    grid = _up(outputs // written_at_once, 1 if inner else block_width)
    target = card.multiprocessors * (threads_per_multiprocessor(card.capability) // (block_width * block_height))
    if values < _MOST or grid > target:
        return 0
    blocks = max(min(_up(target, grid), _up(values, _FEWEST)), _up(values, _MOST))
    if blocks <= 1:
        return 0
    if rule.part == "semaphores":
        return 4 * grid
    return rule.accumulated * outputs * blocks * (1 if inner else block_width * written_at_once)


def _divisor_of(*numbers: int) -> int:
    """``get_output_vec_size``: 4, 2 or 1, whatever divides all."""
    size = 4
    for number in numbers:
        while number % size:
            size //= 2
    return size


def _power_of_two(number: int) -> int:
    """The largest power of two within a number (``last_pow2``)."""
    return 1 << max(number, 1).bit_length() - 1


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
