"""Normalisations as CUDA's kernels allocate: results in plain order, copies of what is not, sums for a moment.

torch derives the layout of a layer norm's gradient from its input's; the kernel does not. ConvNeXt, Swin and the
transformers of diffusion models normalise transposed activations in every block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from vram_guard.scratch import PartialGradient
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.meta_results import result_of
from vram_guard.torch_release import torch_release

_META = torch.device("meta")

#: The release in which large inputs are summed in parts (pull request 150773 of April 2025).
_PARTS_SINCE = (2, 8)
_PARTS: tuple[Literal["rows", "result", "buffer", "semaphores"], ...] = ("rows", "result", "buffer", "semaphores")


def layer_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Output, mean and inverse deviation (layer_norm_kernel.cu, ``layer_norm_cuda``).

    The input is made contiguous for the call, and the output is; the statistics are in the accumulation type.
    """
    return _normalized(recorder, func, args, kwargs, 2)


def rms_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Output and inverse root mean squares, as a layer norm's (layer_norm_kernel.cu, ``_fused_rms_norm_cuda``)."""
    return _normalized(recorder, func, args, kwargs, 1)


def _normalized(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], statistics_kept: int
) -> Any:
    source, normalized = args[:2]
    kept = source.dim() - len(normalized)
    if not source.is_floating_point() or tuple(source.shape[kept:]) != tuple(normalized):
        return result_of(func, args, kwargs)  # torch says what is wrong
    name = str(func)
    copied = _contiguous(recorder, source, name)
    out = _tracked(recorder, _plain(source), name)
    shape = [*source.shape[:kept], *[1] * len(normalized)]
    statistics = [
        _tracked(recorder, torch.empty(shape, dtype=_accumulated(source), device=_META), name)
        for _which in range(statistics_kept)
    ]
    del copied
    return out, *statistics


def layer_norm_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of input, weight and bias (layer_norm_kernel.cu, ``layer_norm_backward_cuda``).

    Input and incoming gradient are made contiguous for the call; what comes out is contiguous.
    """
    gradient, source, _shape, _mean, _deviation, weight, bias, wanted = args
    if not source.is_floating_point() or gradient.shape != source.shape:
        return result_of(func, args, kwargs)
    return _norm_gradients(recorder, func, gradient, source, zip((source, weight, bias), wanted, strict=True))


def rms_norm_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of input and weight, as a layer norm's (layer_norm_kernel.cu, ``_fused_rms_norm_backward_cuda``)."""
    gradient, source, _shape, _deviation, weight, wanted = args
    return _norm_gradients(recorder, func, gradient, source, zip((source, weight), wanted, strict=True))


def _norm_gradients(
    recorder: Recorder, func: Any, gradient: torch.Tensor, source: torch.Tensor, wanted: Any
) -> tuple[torch.Tensor | None, ...]:
    name = str(func)
    copied = [_contiguous(recorder, source, name)]
    tensors = list(wanted)
    made = _gradients(recorder, name, tensors)
    copied.append(_contiguous(recorder, gradient, name))
    _partial_gradients(
        recorder, name, source, [tensor for tensor, asked in tensors[1:] if asked and tensor is not None]
    )
    del copied
    return made


def _partial_gradients(recorder: Recorder, name: str, source: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """The sums by blocks of rows, for weight and bias, and then the sum of each."""
    if torch_release() < _PARTS_SINCE or not weights:
        return
    rows = source.numel() // weights[0].numel() if weights[0].numel() else 0
    held = []
    sums = []
    for weight in weights:
        parts = [
            PartialGradient(part, weight.numel(), weight.element_size(), _accumulated(weight).itemsize)
            for part in _PARTS
        ]
        held.append(recorder.hold((parts[0], (rows,)), name))
        sums.append(parts[1:])
    for parts in sums:
        recorder.scratch(parts, (rows,), name)
    recorder.release(held)


def group_norm_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients; sums by (sample, channel) and by (sample, group) for a moment.

    group_norm_kernel.cu, ``GroupNormBackwardKernelImplInternal``: ds, db and (with a weight) c1 of (N, C), c2 and c3 of
    (N, groups), all in the accumulation type. Autograd hands it contiguous tensors (derivatives.yaml).
    """
    _gradient, source, _mean, _deviation, weight, samples, channels, _positions, groups, wanted = args
    name = str(func)
    if not source.is_floating_point():
        return result_of(func, args, kwargs)
    # The bias is of the weight's size; without a weight there is neither.
    made = _gradients(recorder, name, zip((source, weight, weight), wanted, strict=True))
    size = _accumulated(source).itemsize
    by_channel, by_group = samples * channels * size, samples * groups * size
    by_channels = [by_channel] * (3 if weight is not None else 2)
    recorder.together([*by_channels, by_group, by_group] if wanted[0] else by_channels[:2], name)
    return made


def group_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Output, mean and inverse deviation; two numbers by (sample, channel) for a moment.

    group_norm_kernel.cu, ``GroupNormKernelImplInternal``: where there is more than one position, and a weight.
    """
    source, weight, bias, samples, channels, positions = args[:6]
    out = result_of(func, args, kwargs)
    for tensor in out:
        recorder.track(tensor, str(func))
    if positions > 1 and (weight is not None or bias is not None) and source.is_floating_point():
        size = samples * channels * _accumulated(source).itemsize
        recorder.together([size, size], str(func))
    return out


def batch_norm_forward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Output in the input's layout, mean and inverse deviation of each channel in float32, no reserve."""
    source = args[0]
    training = args[5]
    channels = source.shape[1] if training else 0
    statistics = (torch.empty(channels, dtype=_accumulated(source), device=_META) for _which in ("mean", "deviation"))
    return torch.empty_like(source), *statistics


def cudnn_norm_forward(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``native_batch_norm`` and cuDNN's reserve space, which is empty outside its persistent NHWC mode."""
    return (*batch_norm_forward(r, func, args, kwargs), torch.empty(0, dtype=torch.uint8, device=_META))


def cudnn_norm_backward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of source, weight and bias: ``(source, grad_output, weight, ...)``."""
    source, _grad, weight = args[:3]
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def norm_backward(_r: Recorder, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients as ``native_batch_norm_backward`` returns them: ``(grad_out, source, weight, ...)``."""
    _grad, source, weight = args[:3]
    wanted = zip((source, weight, weight), args[-1], strict=True)
    return tuple(torch.empty_like(tensor) if asked and tensor is not None else None for tensor, asked in wanted)


def _accumulated(source: torch.Tensor) -> torch.dtype:
    """The type in which CUDA sums values of the tensor (AccumulateType.h)."""
    return torch.float64 if source.dtype == torch.float64 else torch.float32


def _gradients(recorder: Recorder, name: str, wanted: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        _tracked(recorder, _plain(tensor), name) if asked and tensor is not None else None for tensor, asked in wanted
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)


def _tracked(recorder: Recorder, tensor: torch.Tensor, name: str) -> torch.Tensor:
    recorder.track(tensor, name)
    return tensor


def _contiguous(recorder: Recorder, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
    """A copy that lives as long as the caller holds it, where one is needed."""
    if not is_symbolic(tensor) or tensor.is_contiguous():
        return None
    copy = _tracked(recorder, _plain(tensor), name)
    recorder.classify([copy], "temporaries")
    return copy
