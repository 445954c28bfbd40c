"""Losses whose kernels first make one number for each element, and then reduce them (Loss.cpp, cuda/Loss.cu)."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import reductions


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[at] if at < len(args) else kwargs.get(name, argument.default_value)
    raise KeyError(name)


def _elements(*tensors: torch.Tensor) -> torch.Tensor:
    """What the kernel writes for these operands, taking no memory."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.empty(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)), dtype=dtype, device="meta")


def _hold(recorder: Recorder, tensor: torch.Tensor, operator: str) -> int | None:
    return recorder.hold(tensor.numel() * tensor.element_size(), operator)


def result_first(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; for the call the elements, where they are reduced (``mse_loss_out``, ``smooth_l1_loss_out``)."""
    out = func(*args, **kwargs)
    name = str(func)
    recorder.track(out, name)
    if _argument(func, args, kwargs, "reduction"):
        elements = _elements(*args[:2])
        held = _hold(recorder, elements, name)
        reductions.column_sum(recorder, elements, range(elements.dim()), name)
        recorder.release([held])
    return out


def elements_first(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same where the elements are there before the result (``huber_loss``)."""
    return _reduced(recorder, func, args, kwargs, [])


def with_logits(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Logarithms of the sigmoids for the time of the call, and the elements (``binary_cross_entropy_with_logits``)."""
    name = str(func)
    held = [_hold(recorder, args[0], name)]
    weight = _argument(func, args, kwargs, "pos_weight")
    if weight is not None:
        less_one, weights = _hold(recorder, weight, name), _hold(recorder, _elements(weight, args[1]), name)
        recorder.release([less_one])
        recorder.release([weights])
    return _reduced(recorder, func, args, kwargs, held)


def _reduced(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], held: list[int | None]
) -> Any:
    name = str(func)
    reduces = _argument(func, args, kwargs, "reduction")
    elements = _elements(*args[:2])
    if reduces:
        held.append(_hold(recorder, elements, name))
    out = func(*args, **kwargs)
    recorder.track(out, name)
    if reduces:
        reductions.column_sum(recorder, elements, range(elements.dim()), name)
    recorder.release(held)
    return out


def keeps_elements(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result in the memory of its elements: it is resized, and lives as long (``binary_cross_entropy_out_cuda``)."""
    name = str(func)
    out = torch.empty_like(args[0], device="meta")
    recorder.track(out, name)
    if _argument(func, args, kwargs, "reduction"):
        reduced = recorder.hold(out.element_size(), name)
        reductions.column_sum(recorder, out, range(out.dim()), name)
        recorder.release([reduced])
        out.resize_(())
    return out
