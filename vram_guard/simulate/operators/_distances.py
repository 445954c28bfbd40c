"""Distances between all pairs of rows: copies, padded operands, and a number for each pair and feature."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import reductions
from vram_guard.simulate.operators.meta_results import result_of


def cdist(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The distances; for the call both operands, spread over the batch (Distance.cpp, ``cdist_impl``)."""
    name = str(func)
    held = _spread(recorder, args[:2], name)
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    recorder.release(held)
    return out


def euclidean(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Distances by a matrix product of operands with two more columns (Distance.cpp, ``_euclidean_dist``)."""
    name = str(func)
    norms = [_norms(recorder, operand, name) for operand in args[:2]]
    rows = [operand.numel() // operand.shape[-1] * operand.element_size() for operand in args[:2]]
    sizes = [operand.numel() * operand.element_size() for operand in args[:2]]
    doubled = recorder.hold(sizes[0], name)
    padded = [recorder.hold(sizes[0] + 2 * rows[0], name)]
    recorder.release([doubled, *norms[0]])  # moved into the list that is joined
    padded.append(recorder.hold(sizes[1] + 2 * rows[1], name))
    recorder.release(norms[1])
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    recorder.release(padded)
    return out


def cdist_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first operand's gradient; for the call a number for each pair and feature.

    Distance.cpp, ``_cdist_backward``; DistanceKernel.cu, ``cdist_backward_kernel_impl``, whose buffer is summed.
    """
    name = str(func)
    _grad, one, other, p = args[:4]
    held = _spread(recorder, (one, other), name, whole=False)
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    if p != 0 and out.numel() and other.numel():
        buffer = torch.empty((*out.shape[:-2], other.shape[-2], *out.shape[-2:]), dtype=out.dtype, device="meta")
        held.append(recorder.hold(buffer.numel() * buffer.element_size(), name))
        reductions.column_sum(recorder, buffer, [buffer.dim() - 3], name)
    recorder.release(held)
    return out


def _norms(recorder: Recorder, operand: torch.Tensor, name: str) -> list[int | None]:
    """The rows' squared lengths and a column of ones; the squares only until they are summed."""
    squares = torch.empty_like(operand, device="meta")
    held = recorder.hold(squares.numel() * squares.element_size(), name)
    rows = operand.numel() // operand.shape[-1] * operand.element_size()
    norms = recorder.hold(rows, name)
    reductions.column_sum(recorder, squares, [operand.dim() - 1], name)
    recorder.release([held])
    return [norms, recorder.hold(rows, name)]


def _spread(
    recorder: Recorder, operands: tuple[torch.Tensor, ...], name: str, *, whole: bool = True
) -> list[int | None]:
    """Contiguous copies of operands over their common batch; ``whole``: also of what is only not contiguous."""
    batch = torch.broadcast_shapes(*(operand.shape[:-2] for operand in operands))
    held: list[int | None] = []
    for operand in operands:
        shape = torch.Size((*batch, *operand.shape[-2:]))
        if operand.shape != shape or (whole and not operand.is_contiguous()):
            held.append(recorder.hold(shape.numel() * operand.element_size(), name))
    return held
