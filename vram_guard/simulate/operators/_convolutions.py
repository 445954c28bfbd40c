"""Convolutions: results, copies into the layout that is used, and cuDNN's workspaces.

Which library runs a convolution on CUDA, and in which layout, follows Convolution.cpp (``select_conv_backend``,
``use_cudnn_depthwise``) and ConvShared.cpp; how much workspace cuDNN takes is asked of an installed cuDNN
(:mod:`.cudnn`) where that is wanted. Where a workspace does not fit, PyTorch goes on to the next kernel
that cuDNN proposes (Conv_v8.cpp, ``try_configs``): a replay under a limit does without it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vram_guard.simulate.device.tf32 import allows_tf32
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators import cudnn
from vram_guard.simulate.operators.meta_results import result_of
from vram_guard.simulate.operators.reductions import column_sum

_ELEMENTS: dict[torch.dtype, cudnn.Element] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_OF_TRANSPOSED: dict[cudnn.Direction, cudnn.Direction] = {
    "forward": "backward_data",
    "backward_data": "forward",
    "backward_filter": "backward_filter",
}


def convolution(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One output; input and weight are copied for the call where their layouts differ from the one used."""
    source, weight = args[:2]
    layout = _format_for(source, weight)
    shape = result_of(func, args, kwargs).shape
    out = torch.empty(shape, dtype=source.dtype, device="meta", memory_format=layout)
    name = str(func)
    recorder.track(out, name)
    workspace = _workspace("forward", source, weight, out, layout, args[3:9])
    copies = [_copy_if_needed(source, layout), _copy_if_needed(weight, layout)]
    recorder.together(copies, name, **workspace._asdict())
    return out


def convolution_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Gradients of input, weight and bias, in this order, in the layout of the forward pass, as the mask asks.

    ConvShared.cpp: ``cudnn_convolution_backward_weight`` copies its operands before it makes its result, and a
    transposed convolution copies the gradient that arrives once for both. DepthwiseConv2d.cu: the gradient of the input
    reads it as it lies (measured on an H100).
    """
    grad, source, weight, bias_sizes = args[:4]
    wanted = args[-1]
    layout = _format_for(source, weight)
    name = str(func)
    made: list[torch.Tensor | None] = [None, None, None]
    copied = _copy_if_needed(grad, layout)
    own_kernel = _by_own_kernel(source, weight, layout, transposed=args[7], groups=args[9])
    at_first = [recorder.hold(copied, name)] if args[7] and copied else []
    for index, (tensor, other) in enumerate(((source, weight), (weight, source))):
        if not wanted[index]:
            continue
        made[index] = out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)
        copies = [0 if at_first or (own_kernel and not index) else copied, _copy_if_needed(other, layout)]
        before = index and not own_kernel
        held = [recorder.hold(size, name) for size in copies if size] if before else []
        recorder.track(out, name)
        direction: cudnn.Direction = "backward_filter" if index else "backward_data"
        workspace = _workspace(direction, source, weight, grad, layout, args[4:10])
        recorder.together([] if before else copies, name, **workspace._asdict())
        recorder.release(held)
    recorder.release(at_first)
    if wanted[2]:
        made[2] = bias = torch.empty(bias_sizes, dtype=grad.dtype, device="meta")
        recorder.track(bias, name)
        # ConvShared.cpp: ``grad_output.sum`` over all but the channels.
        column_sum(recorder, grad, [dim for dim in range(grad.dim()) if dim != 1], name)
    return tuple(made)


# --- layouts ---------------------------------------------------------------------------------------------------------


def _channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()
    return False


def _format_for(*tensors: torch.Tensor) -> torch.memory_format:
    """CuDNN's layout: channels last as soon as the input or the weight is (``cudnn_conv_suggest_memory_format``)."""
    if any(_channels_last(tensor) for tensor in tensors):
        return torch.channels_last if tensors[0].dim() == 4 else torch.channels_last_3d
    return torch.contiguous_format


def _copy_if_needed(tensor: torch.Tensor, layout: torch.memory_format) -> int:
    if tensor.is_contiguous(memory_format=layout):
        return 0
    return tensor.numel() * tensor.element_size()


# --- workspaces ------------------------------------------------------------------------------------------------------


class _Workspace(NamedTuple):
    """A workspace of known size, or the most that one of unknown size takes. Bytes."""

    workspace: int = 0
    unknown: int = 0


def _workspace(
    direction: cudnn.Direction,
    source: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    layout: torch.memory_format,
    settings: tuple[Any, ...],
) -> _Workspace:
    """The workspace of cuDNN for one direction of a convolution; ``settings``: stride, ..., groups."""
    stride, padding, dilation, transposed, _output_padding, groups = settings
    element = _ELEMENTS.get(source.dtype)
    if element is None or not torch.backends.cudnn.enabled or 0 in (source.numel(), weight.numel(), out.numel()):
        return _Workspace()
    if _by_own_kernel(source, weight, layout, transposed=transposed, groups=groups):
        return _Workspace()
    if transposed:  # the forward pass of one is the backward pass of the other
        source, out = out, source
        direction = _OF_TRANSPOSED[direction]
    call = cudnn.Convolution(
        direction,
        element,
        _described(source, layout),
        _described(weight, layout),
        _described(out, layout),
        padding=_planar(padding, 0),
        stride=_planar(stride, 1),
        dilation=_planar(dilation, 1),
        allow_tf32=allows_tf32("conv"),
        deterministic=torch.backends.cudnn.deterministic,
    )
    without_tf32 = element == "float32" and not call.allow_tf32 and _has_winograd(call, layout, groups)
    found = cudnn.workspace(call)
    if found:
        return _Workspace(found)
    if without_tf32:  # a cuDNN that is asked without a GPU never proposes these two: their plans call cuBLAS
        return _Workspace(unknown=max(_winograd(call), _fourier(call)))
    if found is not None:
        return _Workspace()
    if element == "float32":
        return _Workspace(unknown=_most(call, layout, groups))
    return _Workspace(_transposed_copies(layout, groups, source, out))


def _by_own_kernel(
    source: torch.Tensor, weight: torch.Tensor, layout: torch.memory_format, *, transposed: bool, groups: int
) -> bool:
    """PyTorch's own depthwise kernels, which take no workspace; float16 may go to cuDNN (``use_cudnn_depthwise``)."""
    if layout is not torch.contiguous_format or source.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _is_depthwise(source, weight, transposed, groups)


def _is_depthwise(source: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """``ConvParams::is_depthwise`` in Convolution.cpp."""
    return not transposed and groups > 1 and source.shape[1] == groups and weight.shape[0] % groups == 0


def _described(tensor: torch.Tensor, layout: torch.memory_format) -> cudnn.Tensor:
    """Sizes and strides in that layout; one spatial dimension becomes two (``view1d_as_2d``)."""
    sizes = tuple(int(size) for size in tensor.shape)
    if len(sizes) == 3:
        sizes = (*sizes[:2], 1, sizes[2])
    order = [*range(len(sizes))] if layout is torch.contiguous_format else [0, *range(2, len(sizes)), 1]
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
    return cudnn.Tensor(sizes, tuple(strides))


def _planar(values: Any, neutral: int) -> tuple[int, ...]:
    return (neutral, int(values[0])) if len(values) == 1 else tuple(int(value) for value in values)


def _has_winograd(call: cudnn.Convolution, layout: torch.memory_format, groups: int) -> bool:
    """``WINOGRAD_NONFUSED`` in cuDNN's developer guide: 3 x 3 with stride 1, in NCHW."""
    by_shape = call.weight.sizes[2:] == (3, 3) and set(call.stride + call.dilation) == {1} and groups == 1
    return by_shape and layout is torch.contiguous_format


def _winograd(call: cudnn.Convolution) -> int:
    """F(4x4, 3x3) with its transforms in memory of their own (:func:`_most`)."""
    batch, channels, *plane = call.out.sizes
    tiles = batch * math.prod(-(-size // 4) for size in plane)
    return 4 * (36 * tiles * (call.source.sizes[1] + channels) + 4 * math.prod(call.weight.sizes))


def _fourier(call: cudnn.Convolution) -> int:
    """The most that ``FFT`` takes of a call without TF32: 0 where the plane is too large for it.

    In planes of the next power of two, half of the frequencies: twice the transforms of the activation and the filters,
    and the filters themselves. That is what forward passes took on an H200 in all 9 shapes that got FFT; gradients of
    inputs took less, and gradients of filters did not get it.
    """
    if call.direction == "backward_filter":
        return 0
    side = 1 << (max(call.source.sizes[2:]) + 1).bit_length()
    if side > 256:
        return 0
    batch, outputs, inputs = call.source.sizes[0], *call.weight.sizes[:2]
    numbers = 2 * (batch * max(inputs, outputs) + inputs * outputs) * side * (side // 2 + 1)
    return 8 * numbers + 4 * math.prod(call.weight.sizes)


def _most(call: cudnn.Convolution, layout: torch.memory_format, groups: int) -> int:
    """The most that cuDNN's usual float32 kernels take for this call, where no cuDNN says it.

    Two kinds of kernels take workspaces that grow with the activations; which one is chosen is published nowhere.

    - TF32 kernels want NHWC, as those in half precision do (:func:`_transposed_copies`): a copy of everything in NCHW.
    - Winograd's F(4x4, 3x3) with its transforms in memory of their own: for each channel and each 4 x 4 of the output
      36 numbers of the input and of the output, and 36 for the 9 of each filter (Lavin and Gray, "Fast Algorithms for
      Convolutional Neural Networks", section 4.3; cuDNN's developer guide: ``WINOGRAD_NONFUSED``, 3 x 3 with stride 1
      in float32).

    Public traces of ResNet-50 on a V100 (pytorch/kineto) show workspaces of exactly these sizes, and smaller ones.
    FFT, which few shapes get, can take more.
    """
    if _has_winograd(call, layout, groups):
        return _winograd(call)  # the transforms are never less than the copies
    if layout is not torch.contiguous_format:
        return 0
    return 4 * sum(math.prod(tensor.sizes) for tensor in (call.source, call.weight, call.out))


def _transposed_copies(layout: torch.memory_format, groups: int, *read: torch.Tensor) -> int:
    """Without a cuDNN to ask: its copies for half-precision kernels in NCHW; 0 where nothing is known.

    Half-precision kernels want NHWC and channels in multiples of 8: "NCHW can still be operated on by Tensor Cores, but
    include some overhead due to automatic transpose operations" (NVIDIA, Convolutional Layers User's Guide), and packed
    NCHW is padded automatically (NVIDIA's blog, "Tensor Ops Made Easier in cuDNN"). So a copy of each of the two
    activations of the call, padded. Liger-Kernel's published peaks of a bfloat16 convolution with 4 channels show just
    that: four times the size of one activation. Depthwise and grouped kernels are others, and are left out.
    """
    if layout is not torch.contiguous_format or groups != 1 or read[0].element_size() != 2:
        return 0
    return sum(t.numel() // t.shape[1] * (-(-t.shape[1] // 8) * 8) * t.element_size() for t in read)
