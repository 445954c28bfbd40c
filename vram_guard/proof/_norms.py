"""Norms of tensors and of their differences, in pieces: fast, exact enough, and without copies as large as a model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

#: Elements of a piece. Single precision adds up that many squares to 1e-5 or better; 25 million to 1e-3 only.
_PIECE = 2**18
#: Lengths whose squares single precision holds.
_SMALLEST, _LARGEST = 1e-15, 1e15


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of all elements; NaN or infinite where one is."""
    return math.hypot(*(_length(piece) for (piece,) in _pieces(tensor)))


def norm_of_finite(tensor: torch.Tensor) -> float:
    """The norm without the elements that are no numbers."""
    length = norm(tensor)
    return length if math.isfinite(length) else norm(tensor.nan_to_num(0.0, 0.0, 0.0))


def distance(
    one: torch.Tensor, other: torch.Tensor, *, alike: tuple[torch.Tensor, torch.Tensor, float] | None = None
) -> float:
    """The norm of the difference of two tensors of one shape.

    NaN and infinities are equal to themselves; infinite where they stand at other places.

    Args:
        one: the first.
        other: the second.
        alike: two more tensors of that shape and a tolerance: elements of which these differ by more are left out.
    """
    if alike is None:
        return math.hypot(*(_apart(*pieces) for pieces in _pieces(one, other)))
    *others, tolerance = alike
    return math.hypot(
        *(
            _apart(torch.where((first - second).abs() <= tolerance * torch.maximum(first.abs(), second.abs()), a, b), b)
            for a, b, first, second in _pieces(one, other, *others)
        )
    )


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Stretches of tensors of one shape, in a type that differences can be taken in."""
    flat = [(torch.view_as_real(each) if each.is_complex() else each).reshape(-1) for each in tensors]
    for pieces in zip(*(each.split(_PIECE) for each in flat), strict=True):
        yield tuple(each if each.dtype in (torch.float32, torch.float64) else each.double() for each in pieces)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    length = _length(one - other)
    if math.isfinite(length):
        return length
    same = (one == other) | (one.isnan() & other.isnan())
    if not bool((same | (one.isfinite() & other.isfinite())).all()):
        return math.inf
    return _length(torch.where(same, 0.0, one.double() - other.double()))


def _length(piece: torch.Tensor) -> float:
    length = float(torch.linalg.vector_norm(piece))
    if piece.dtype == torch.float32 and not _SMALLEST < length < _LARGEST:
        length = float(torch.linalg.vector_norm(piece, dtype=torch.float64))
    return length
