"""Floating-point operations of an operator, and the part of a GPU that works on them.

FLOPs are those of ``torch.utils.flop_counter`` (a multiplication and an addition are two), worked out here directly
for the operators that every model calls thousands of times, from torch's registry for the rest. They differ from it
where the kernels do: a convolution's backward divides by its groups; causal attention computes half of the scores (the
fused kernels skip the blocks above the diagonal; flop_counter says of itself that it does not account for that);
products of complex numbers count four times. cuDNN's recurrent layers have no formula in torch: every weight is used
once a sample and time step, twice that in the backward pass. All other operators count no FLOPs: a few operations an
element never take longer than moving the element, on any GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vram_guard.simulate.device.tf32 import allows_tf32
from vram_guard.timeline import Unit

Args = tuple[Any, ...]
Formula = Callable[[Args, dict[str, Any], Any], int]


def _mm(args: Args, _kwargs: dict[str, Any], _out: Any) -> int:
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]  # mm.dtype: the last one is a dtype
    return int(2 * left.numel() * right.shape[-1])


def _convolution(args: Args, _kwargs: dict[str, Any], out: torch.Tensor) -> int:
    source, weight, transposed = args[0], args[1], args[6]
    places = source if transposed else out  # each of them meets the whole filter once
    return int(2 * source.shape[0] * math.prod(places.shape[2:]) * weight.numel())


def _convolution_backward(args: Args, kwargs: dict[str, Any], _out: Any) -> int:
    """Each of the two gradients takes the multiplications of the forward pass."""
    grad, source, weight = args[:3]
    wanted = args[10]
    forward = _convolution((source, weight, None, None, None, None, args[7]), kwargs, grad)
    return forward * (int(wanted[0]) + int(wanted[1]))


def _attention(flops: int, index: int, args: Args, kwargs: dict[str, Any]) -> int:
    causal = args[index] if len(args) > index else kwargs.get("is_causal", False)
    return flops // 2 if causal else flops


def _attention_forward(causal_at: int) -> Formula:
    """Query times keys, and scores times values."""

    def flops(args: Args, kwargs: dict[str, Any], _out: Any) -> int:
        query, key, value = args[:3]
        scores = 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2])
        return _attention(scores * (query.shape[-1] + value.shape[-1]), causal_at, args, kwargs)

    return flops


def _attention_backward(causal_at: int) -> Formula:
    """Five products: the scores again, their gradient, and those of query, key and value."""

    def flops(args: Args, kwargs: dict[str, Any], _out: Any) -> int:
        query, key, value = args[1:4]
        scores = 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2])
        return _attention(scores * (3 * query.shape[-1] + 2 * value.shape[-1]), causal_at, args, kwargs)

    return flops


def _recurrent(args: Args, _kwargs: dict[str, Any], _out: Any) -> int:
    source, weights = args[:2]
    samples = source.numel() // max(1, int(source.shape[-1]))
    return int(2 * samples * sum(weight.numel() for weight in weights if weight.dim() > 1))


def _recurrent_backward(args: Args, kwargs: dict[str, Any], out: Any) -> int:
    return 2 * _recurrent(args, kwargs, out)


MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
RECURRENT = frozenset({"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"})
_CONVOLUTIONS = frozenset({"aten::convolution", "aten::convolution_backward"})

FLOPS: dict[str, Formula] = {
    **dict.fromkeys(MATMULS, _mm),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention_forward(4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_efficient_attention": _attention_forward(6),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_cudnn_attention": _attention_forward(6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
}


def formula_of(func: Any) -> Formula | None:
    """The formula for an operator's FLOPs from its arguments and result; None: it has none worth counting."""
    own = FLOPS.get(func._schema.name)
    if own is not None:
        return own
    formula: Any = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


def unit_of(name: str, dtype: torch.dtype) -> Unit:
    """The unit for an operator of this dtype: torch lets cuDNN use TF32, and matrix products only on request."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == torch.float64:
        return "fp64"
    if "efficient_attention" in name:
        return "3xtf32"  # gemm_kernel_utils.h: OpMultiplyAddFastF32 from compute capability 8.0 on
    if name in RECURRENT:
        return "tf32" if allows_tf32("rnn") else "fp32"
    return "tf32" if allows_tf32("conv" if name in _CONVOLUTIONS else "matmul") else "fp32"
