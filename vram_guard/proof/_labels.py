"""What a tensor was computed of: nothing of the batch, one sample for each element, or a sum over samples.

A label holds the sample of every element, in an array with one dimension for each of the tensor's; where all elements
along a dimension are alike, its size there is 1. So a label stays small, and what moves elements about moves it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vram_guard.apply.normalisers import EveryLabel, Normaliser

#: In a label's array: of no sample.
NONE = -1


class Term(NamedTuple):
    """A sum over samples of something that each has computed by itself."""

    key: int
    """Of the operators that computed it."""
    weights: tuple[float, ...]
    """By which each sample's is multiplied."""
    counted: Normaliser | EveryLabel | None = None
    """By which the sum is divided."""


class Part(NamedTuple):
    """Values of a part of the batch, or a test of them that a mean may be taken over."""

    path: tuple[Any, ...]
    shifted: bool = False
    """Without the first value along the last dimension."""
    filled: float | None = None
    """The value by which it is one longer than the batch's."""
    test: str = ""
    """"others": what is not ``value``; "equal": what is; "positive": what is above zero; "": the values themselves."""
    value: float = 0.0
    summed: bool = False
    """Each is a sum of such values."""
    whole: bool = False
    """They are whole numbers."""
    is_turned: bool = False
    """Their last dimension is another than the batch's."""

    def counted(self) -> Normaliser | None:
        """What the sum of these values counts; None where it is no count that is known."""
        if self.filled is not None and not (self.shifted and self.test == "others" and self.value == self.filled):
            return None
        if self.test == "equal":
            return None
        if self.test == "positive":
            return Normaliser(self.path, "positive", shifted=self.shifted)
        if self.test == "others":
            return Normaliser(self.path, ignored=self.value, shifted=self.shifted)
        return Normaliser(self.path, "sum", shifted=self.shifted)


@dataclass(frozen=True, eq=False)
class Label:
    """What a tensor was computed of.

    Attributes:
        ids: the sample of each element; of what depends on none, its size is 1 where elements along a dimension are
            equal, and otherwise as large as the tensor.
        key: of the operators that made it, with their numbers; equal for what was computed in the same way.
        const: it depends on no sample.
        drawn: it holds random numbers, one for each element of ``ids``, and depends on no sample.
        terms: of a sum over samples; None for all others.
        beside: the key of terms that depend on no sample and were added to these; 0 where there are none.
        why: the operator that joined samples; "" where they are apart.
        part: of the batch, whose values these are.
        natural: no value is below zero.
        held: it was computed of what was there before the step, such as a buffer.
        counter: what a sum counts, by what it is multiplied, and whether these are whole numbers.
    """

    ids: torch.Tensor
    key: int
    const: bool = False
    drawn: bool = False
    terms: tuple[Term, ...] | None = None
    beside: int = 0
    why: str = ""
    part: Part | None = None
    natural: bool = False
    held: bool = False
    counter: tuple[Normaliser, float, bool] | None = None

    @property
    def apart(self) -> bool:
        """True where each element depends on one sample, or on none."""
        return self.terms is None and not self.why

    @property
    def samples(self) -> frozenset[int]:
        """All samples that it depends on."""
        return frozenset(self.ids.flatten().tolist()) - {NONE}

    def with_(self, **changes: Any) -> Label:
        """The same with other values."""
        return replace(self, **changes)


def key_of(*parts: Any) -> int:
    """A number that is equal for equal parts, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def constant(key: int, shape: Sequence[int], *, uniform: bool, **more: Any) -> Label:
    """A label for what depends on no sample."""
    return Label(nothing([1 if uniform else size for size in shape]), key, const=True, **more)


def joined(why: str, dims: int) -> Label:
    """A label for what samples were joined in."""
    return Label(nothing((1,) * dims), 0, why=why)


def nothing(shape: Sequence[int]) -> torch.Tensor:
    """The array of what is of no sample; it takes no memory."""
    return torch.full((), NONE).expand(tuple(shape))


def compressed(ids: torch.Tensor) -> torch.Tensor:
    """Without the dimensions along which all elements are alike; those of no sample count to the sample beside them."""
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1:
            found = ids.amax(dim, keepdim=True)
            if bool(((ids == found) | (ids == NONE)).all()):
                ids = found
    return ids


class MismatchError(Exception):
    """Elements of different samples meet; says how."""


def met(labels: Sequence[Label]) -> torch.Tensor:
    """The samples of what is made of equally placed elements, broadcast against each other.

    Raises:
        MismatchError: elements of different samples meet, or a sample meets what it is given by its place.
    """
    dims = max(label.ids.dim() for label in labels)
    arrays = [label.ids.view((1,) * (dims - label.ids.dim()) + tuple(label.ids.shape)) for label in labels]
    shape = torch.broadcast_shapes(*(array.shape for array in arrays))
    if all(label.const for label in labels):
        return nothing(shape)
    of_samples = [array for array, label in zip(arrays, labels, strict=True) if not label.const]
    found = of_samples[0]
    for array in of_samples[1:]:
        one, other = torch.broadcast_tensors(found, array)
        if bool((one != other).any()):
            raise MismatchError("")
        found = torch.maximum(one, other)
    found = compressed(found.clone())
    along = [dim for dim in range(dims) if found.shape[dim] > 1]
    for array, label in zip(arrays, labels, strict=True):
        if label.drawn and not all(array.shape[dim] > 1 for dim in along):
            raise MismatchError("drawn")
        if label.const and not label.drawn and any(array.shape[dim] > 1 for dim in along):
            raise MismatchError("place")
    return found


def along(label: Label, dims: Sequence[int]) -> bool:
    """True where samples differ along one of these dimensions."""
    return any(label.ids.shape[dim] > 1 for dim in dims) and not label.const


def without(ids: torch.Tensor, dims: Sequence[int], *, keep: bool = False) -> torch.Tensor:
    """The array once elements along some dimensions have become one."""
    wanted = sorted({dim % ids.dim() for dim in dims}, reverse=True) if ids.dim() else []
    for dim in wanted:
        ids = ids.narrow(dim, 0, 1)
        ids = ids if keep else ids.squeeze(dim)
    return ids


def reshaped(label: Label, shape: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """The array of a tensor of ``shape`` that is viewed in another one."""
    if 0 in (*shape, *new):
        return nothing((1,) * len(new))
    ids, sizes, seen = label.ids, list[int](), list[int]()
    for dims, target in _groups(shape, new):
        varies = any(ids.shape[dim] > 1 for dim in dims)  # where nothing differs in a group, nothing does afterwards
        sizes += [new[dim] if varies else 1 for dim in target]
        seen += [shape[dim] if varies else 1 for dim in dims]
    return nothing(sizes) if label.const else compressed(ids.expand(seen).reshape(sizes))


def _groups(shape: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Dimensions of two shapes that hold the same elements, from left to right."""
    at = to = 0
    while at < len(shape) or to < len(new):
        begun, first, one, other = at, to, 1, 1
        while at == begun or to == first or one != other:
            if at < len(shape) and (one <= other or to == len(new)):
                one *= shape[at]
                at += 1
            elif to < len(new):
                other *= new[to]
                to += 1
            else:
                break
        yield range(begun, at), range(first, to)


def weights_of(label: Label, shape: Sequence[int], samples: int, factor: float) -> tuple[float, ...]:
    """How often each sample is in a tensor of this shape, times a factor."""
    times = math.prod(shape) / max(1, label.ids.numel())
    counts = torch.bincount(label.ids.flatten()[label.ids.flatten() != NONE], minlength=samples)
    return tuple(float(count) * times * factor for count in counts.tolist())


def added(*of: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms of a sum of sums: those that were computed in the same way are one."""
    found: dict[tuple[Any, ...], tuple[float, ...]] = {}
    for term in (term for terms in of for term in terms):
        at = (term.key, term.counted)
        before = found.get(at)
        found[at] = term.weights if before is None else tuple(map(sum, zip(before, term.weights, strict=True)))
    return tuple(Term(key, weights, count) for (key, count), weights in found.items())
