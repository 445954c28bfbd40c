"""Losses whose kernels first make one number for each element, and then reduce them (Loss.cpp, cuda/Loss.cu)."""

from __future__ import annotations

from typing import Any

import torch

from vram_guard.simulate.device import constants
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import reductions
from vram_guard.simulate.operators.meta_results import result_of


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
    """The result; for the call the elements, where they are reduced (``mse_loss_out``, ``smooth_l1_loss_out``).

    Its memory is as large as the elements, and becomes one number's view (``TORCH_META_FUNC(mse_loss)``: ``resize_``).
    """
    name = str(func)
    reduces = _argument(func, args, kwargs, "reduction")
    elements = _elements(*args[:2])
    out = torch.empty_like(elements).resize_(()) if reduces else result_of(func, args, kwargs)
    recorder.track(out, name)
    if reduces:
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
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    if reduces:
        reductions.column_sum(recorder, elements, range(elements.dim()), name)
    recorder.release(held)
    return out


def keeps_elements(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result in the memory of its elements: it is resized, and lives as long.

    cuda/Loss.cu, ``binary_cross_entropy_out_cuda``; Loss.cpp, ``soft_margin_loss_out``.
    """
    name = str(func)
    out = torch.empty_like(args[0], device="meta")
    recorder.track(out, name)
    if _argument(func, args, kwargs, "reduction"):
        reduced = recorder.hold(out.element_size(), name)
        reductions.column_sum(recorder, out, range(out.dim()), name)
        recorder.release([reduced])
        out.resize_(())
    return out


def soft_margin_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient, and ``exp(-target * input)`` with what it is made of (``soft_margin_loss_backward_out``)."""
    name = str(func)
    _grad, source, target = args[:3]
    elements = _elements(source, target)
    made = [_hold(recorder, target, name), _hold(recorder, elements, name)]
    exponentials = _hold(recorder, elements, name)
    recorder.release(made)
    out = result_of(func, args, kwargs)
    recorder.track(out, name)
    recorder.release([exponentials])
    return out


def ctc(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Losses and the table of log-probabilities that the backward needs; lengths and offsets for the call.

    cuda/LossCTC.cu, ``ctc_loss_gpu_template``. The table has two columns for each element of the longest target.
    """
    name = str(func)
    scores, targets, _lengths, target_lengths = args[:4]
    length, batch, _labels = scores.shape
    held = _lengths_on_gpu(recorder, batch, name)
    table = scores.new_empty((batch, length, 2 * _longest(targets, target_lengths) + 1), device="meta")
    recorder.track(table, name)
    losses = scores.new_empty((batch,), device="meta")
    recorder.track(losses, name)
    recorder.release(held)
    return losses, table


def ctc_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The scores' gradient; for the call a second table, and for large problems the sums over its blanks.

    cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``.
    """
    name = str(func)
    _grad, scores, *_rest = args
    table = args[6]
    length, batch, labels = scores.shape
    held = [*_lengths_on_gpu(recorder, batch, name), _hold(recorder, table, name)]
    out = torch.empty(scores.shape, dtype=scores.dtype, device="meta")
    recorder.track(out, name)
    if 2 * length + 24 * batch // 10 + 2 * labels // 10 > LARGE_CTC:
        _sums_over_blanks(recorder, table, name)
        if _argument(func, args, kwargs, "zero_infinity"):
            first, out = out, torch.empty_like(out)
            recorder.track(out, name)
            del first
    recorder.release(held)
    return out


#: LossCTC.cu, ``is_large``.
LARGE_CTC = 450


def _sums_over_blanks(recorder: Recorder, table: torch.Tensor, name: str) -> None:
    """``logsumexp(alpha + beta)`` over every second column: the sum, its maxima and exponentials, the result."""
    batch, length, columns = table.shape
    size = table.element_size()
    rows, blanks = batch * length * size, batch * length * (columns // 2 + 1) * size
    summed, result = recorder.hold(blanks, name), recorder.hold(rows, name)
    recorder.together([rows, blanks], name)
    recorder.release([summed, result])


def _lengths_on_gpu(recorder: Recorder, batch: int, name: str) -> list[int | None]:
    """Lengths of targets and of inputs, and offsets, in int64."""
    return [recorder.hold(8 * batch, name) for _ in range(3)]


def _longest(targets: torch.Tensor, lengths: Any) -> int:
    """Of all targets: where the lengths are not known, what has room."""
    if isinstance(lengths, torch.Tensor):
        known = constants.compute(lengths)
        lengths = None if known is None else known.tolist()
    if lengths is not None:
        return max(lengths, default=0)
    return targets.shape[-1]
