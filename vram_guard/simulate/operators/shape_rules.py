"""Shapes of the most frequent operators, worked out directly.

torch computes the results of many operators on the meta device in Python, at 0.1 to 1.5 ms a call; a transformer step
makes thousands. The rules here answer the plain cases (floating-point tensors whose dimensions lie in memory in their
order) in microseconds and return None for everything else, which then goes torch's way. A
test compares every rule with torch's own answer: shape, strides and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.tensors import is_dense

Rule = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_META = torch.device("meta")

#: torch's own, and not what the user's code gets while a trace runs: that asks each time who calls.
_empty, _empty_strided = torch.empty, torch.empty_strided


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _empty(tensor.shape, dtype=dtype or tensor.dtype, device=_META)


def _plain(tensor: Any) -> bool:
    """A symbolic floating-point tensor in contiguous memory, with at least one dimension."""
    return (
        isinstance(tensor, torch.Tensor)
        and is_symbolic(tensor)
        and tensor.dtype.is_floating_point
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not _ambiguous(tensor.shape)
    )


def _laid_out(tensor: Any) -> bool:
    """A symbolic floating-point tensor in contiguous memory; its shape may be :func:`_ambiguous`."""
    return (
        isinstance(tensor, torch.Tensor)
        and is_symbolic(tensor)
        and tensor.dtype.is_floating_point
        and tensor.dim() > 0
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )


def _ambiguous(shape: Sequence[int]) -> bool:
    """True if such a tensor is channels last as well as contiguous: torch then has reasons of its own to choose."""
    return len(shape) in (4, 5) and (shape[1] == 1 or all(size == 1 for size in shape[2:]))


def _in_order(tensor: Any) -> bool:
    """A symbolic floating-point tensor whose dimensions lie in memory in their order: the last one closest together.

    Gaps do no harm: an element-wise result of such operands is contiguous (TensorIterator, ``reorder_dimensions``).
    """
    if not (isinstance(tensor, torch.Tensor) and is_symbolic(tensor) and tensor.dtype.is_floating_point):
        return False
    if tensor.dim() == 0 or tensor.numel() == 0 or _ambiguous(tensor.shape):
        return False
    # Dimensions of one element have strides too, which TensorIterator looks at where they are not broadcast.
    strides = tensor.stride()
    return strides[-1] > 0 and all(
        one > other or (one == other and size == 1)
        for (one, other), size in zip(pairwise(strides), tensor.shape[1:], strict=True)
    )


def _broadcast(one: torch.Size, other: torch.Size) -> list[int] | None:
    """The shape that two shapes broadcast to; None where they do not."""
    if len(one) < len(other):
        one, other = other, one
    shape = list(one)
    for at, size in enumerate(other, len(one) - len(other)):
        if shape[at] == 1:
            shape[at] = size
        elif size not in (1, shape[at]):
            return None
    return shape


def _unary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    # Contiguous operands of one shape make a contiguous result (TensorIterator, ``FastSetupType::CONTIGUOUS``).
    ordered = _in_order(tensor) or (len(args) == 1 and _laid_out(tensor))
    return _like(tensor) if ordered and not _complex(args[1:]) else None


def _power(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``pow`` with a number as exponent."""
    tensor, exponent = args[:2]
    return _like(tensor) if _plain(tensor) and isinstance(exponent, (int, float)) else None


def _complex(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, complex) for value in values)


def _binary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two operands: tensors whose shapes broadcast, a scalar tensor, or a number."""
    if kwargs.keys() - {"alpha"}:
        return None
    first, second = args[:2]
    if not isinstance(first, torch.Tensor) or (isinstance(second, torch.Tensor) and second.dim() > first.dim()):
        first, second = second, first
    if not isinstance(second, torch.Tensor) and _counts(first) and type(second) is int:
        return _like(first)
    if not _in_order(first):
        if _alike(first, second):
            return _like(first, _promoted(first, second))
        return _as_first(*args[:2])
    if not isinstance(second, torch.Tensor):
        return None if isinstance(second, complex) else _like(first)
    if second.dim() == 0:
        return None if second.dtype.is_complex else _like(first)
    shape = _broadcast(first.shape, second.shape)
    if not _in_order(second):
        # The first operand decides about each pair of dimensions, where none of them is broadcast (``should_swap``).
        decides = first is args[0] and shape == [*first.shape] and is_symbolic(second)
        return _like(first, _promoted(first, second)) if decides and second.dtype.is_floating_point else None
    if shape is None or _ambiguous(shape):
        return None
    return _empty(shape, dtype=_promoted(first, second), device=_META)


def _promoted(one: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    return torch.promote_types(one.dtype, other.dtype)


def _alike(one: Any, other: Any) -> bool:
    """True for two tensors of one shape in contiguous memory."""
    return _laid_out(one) and _laid_out(other) and one.shape == other.shape


def _as_first(first: Any, second: Any) -> Any:
    """Two tensors of one shape, of which the first lies in another order: it decides about each pair of dimensions."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)) or first.shape != second.shape:
        return None
    if not (is_symbolic(first) and is_symbolic(second) and second.dtype.is_floating_point) or 1 in first.shape:
        return None
    strides = first.stride()
    decides = first.dtype.is_floating_point and len({*strides}) == len(strides) and is_dense(first)
    return _empty_strided(first.shape, strides, dtype=_promoted(first, second), device=_META) if decides else None


def _division(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole numbers divide to others of another dtype."""
    return None if any(map(_counts, args[:2])) and not any(map(_in_order, args[:2])) else _binary(args, kwargs)


def _counts(tensor: Any) -> bool:
    """A symbolic number: how many updates an average has had."""
    return isinstance(tensor, torch.Tensor) and is_symbolic(tensor) and not tensor.dim() and tensor.dtype == torch.int64


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Backward of an element-wise operator: gradient and saved tensor alike."""
    first, second = args[:2]
    alike = _in_order(first) and _in_order(second) and first.shape == second.shape and first.dtype == second.dtype
    return _like(first) if alike and not kwargs.keys() - {"approximate"} else None


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, left, right = args[:3]
    columns = right.shape[-1]
    if bias.dtype != left.dtype or bias.dim() > 2 or bias.shape[-1:] not in ((columns,), (1,)):
        return None
    if bias.dim() == 2 and bias.shape[0] not in (1, left.shape[0]):
        return None
    return _mm((left, right), {})


def _mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    good = left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0] and left.dtype == right.dtype
    if not good or kwargs or not (is_symbolic(left) and is_symbolic(right)):
        return None
    return _empty((left.shape[0], right.shape[1]), dtype=left.dtype, device=_META)


def _baddbmm_to_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``baddbmm(..., out_dtype=)``, whose meta kernel takes the dtype for a number; checks of ``Blas.cpp``."""
    added, left, right, dtype = args
    shape = (*left.shape[:-1], right.shape[-1])
    if not left.dim() == right.dim() == 3 or left.shape[::2] != right.shape[:2]:
        return None
    if (
        left.dtype != right.dtype
        or added.dtype not in (dtype, left.dtype)
        or _broadcast(added.shape, torch.Size(shape)) != [*shape]
    ):
        return None
    return _empty(shape, dtype=dtype, device=_META)


def _native_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, p, train = args[:3]
    if not _plain(tensor) or not train or not 0 < p < 1:
        return None
    return _like(tensor), _like(tensor, torch.bool)


def _dropout_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, mask = args[:2]
    return _like(gradient) if _plain(gradient) and gradient.shape == mask.shape and mask.is_contiguous() else None


def _group_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Output, mean and inverse deviation."""
    tensor, weight, bias, samples, _channels, _positions, groups = args[:7]
    if not _plain(tensor) or any(p is not None and not _plain(p) for p in (weight, bias)):
        return None
    return _like(tensor), *(_empty((samples, groups), dtype=tensor.dtype, device=_META) for _ in range(2))


def _in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise update: the first operand itself, where the others are of its shape and dtype, or numbers."""
    target = args[0]
    if kwargs.keys() - {"alpha", "value"} or not _laid_out(target) or _complex(args[1:]):
        return None
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if not is_symbolic(other) or other.dtype != target.dtype or other.shape != target.shape:
                return None
        elif not isinstance(other, (int, float)):
            return None
    return target


def _last_dim_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, _dim, half_to_float = args[:3]
    if not _plain(tensor) or (half_to_float and tensor.dtype != torch.float16):
        return None
    return _like(tensor, torch.float32 if half_to_float else None)


def _made_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory like a tensor's: its strides too, where they leave no gaps (TensorFactories.cpp, ``empty_like``)."""
    tensor = args[0]
    if any(kwargs.get(name) for name in ("layout", "device", "pin_memory")):
        return None
    return _copied(tensor, kwargs) if _in_order(tensor) or _laid_out(tensor) else None


def _copied(tensor: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    memory_format, dtype = kwargs.get("memory_format"), kwargs.get("dtype") or tensor.dtype
    if memory_format is torch.contiguous_format:
        return _empty(tensor.shape, dtype=dtype, device=_META)
    if memory_format not in (None, torch.preserve_format):
        return None
    if tensor.is_contiguous() or is_dense(tensor):
        return _empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META)
    return _empty(tensor.shape, dtype=dtype, device=_META) if _in_order(tensor) else None


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``clone`` and ``_to_copy``; the device is the caller's matter."""
    tensor = args[0]
    usual = (
        kwargs.get("layout") in (None, torch.strided)
        and kwargs.get("device") in (None, _META)
        and not kwargs.get("pin_memory")
    )
    if not usual or not is_symbolic(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    # Dimensions of one element get strides of their own where the copy is laid out anew.
    return _copied(tensor, kwargs) if tensor.is_contiguous() or 1 not in tensor.shape else None


def _cat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Joined tensors are contiguous where not all of them are channels last."""
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    shape = _joined(tensors, dim)
    if kwargs or shape is None or not any(_not_channels_last(tensor, tensor.shape) for tensor in tensors):
        return None
    return _empty(shape, dtype=tensors[0].dtype, device=_META)


def _stack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    if kwargs or _joined(tensors, 0) is None or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return None
    rank = tensors[0].dim()
    if not -rank - 1 <= dim <= rank:
        return None
    dim %= rank + 1
    # Behind the last dimension torch joins tensors with one dimension more.
    if not any(_not_channels_last(tensor, (*tensor.shape, 1) if dim == rank else tensor.shape) for tensor in tensors):
        return None
    shape = [*tensors[0].shape]
    shape.insert(dim, len(tensors))
    return _empty(shape, dtype=tensors[0].dtype, device=_META)


def _joined(tensors: Any, dim: int) -> list[int] | None:
    """The shape of these tensors one behind the other; None where they are not alike enough to tell."""
    first = tensors[0] if tensors else None
    if not isinstance(first, torch.Tensor) or not -first.dim() <= dim < first.dim():
        return None
    rank, dtype, shape = first.dim(), first.dtype, [*first.shape]
    dim %= rank
    shape[dim] = 0
    for tensor in tensors:
        if not is_symbolic(tensor) or tensor.layout is not torch.strided or tensor.dim() != rank:
            return None
        own = tensor.shape
        if (
            tensor.dtype != dtype
            or not own[dim]
            or own[:dim] != first.shape[:dim]
            or own[dim + 1 :] != first.shape[dim + 1 :]
        ):
            return None
        shape[dim] += own[dim]
    return shape


def _not_channels_last(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """True if a tensor with this shape, of those memory, is certainly not channels last."""
    return len(shape) not in (4, 5) or (tensor.is_contiguous() and not _ambiguous(shape))


def _slice_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros of the shape that was sliced, with the gradient in them."""
    gradient, sizes = args[:2]
    if kwargs or not is_symbolic(gradient) or len(sizes) != gradient.dim() or 0 in sizes:
        return None
    return _empty(sizes, dtype=gradient.dtype, device=_META)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like``, in a tenth of its time where that can be."""
    made: torch.Tensor | None = _made_like((tensor,), {})
    return torch.empty_like(tensor) if made is None else made


def _sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum over some dimensions is contiguous, wherever its operand lies (ReduceOpsUtils.h, ``resize_reduction``)."""
    tensor, dims, keep = (*args, *((), False)[len(args) - 1 :])[:3]
    if not (is_symbolic(tensor) and tensor.dtype.is_floating_point and tensor.dim()) or kwargs.keys() - {"dtype"}:
        return None
    rank = tensor.dim()
    if not all(-rank <= dim < rank for dim in dims or ()):
        return None
    reduced = {dim % rank for dim in dims} if dims else {*range(rank)}
    if len(reduced) != len(dims or range(rank)):
        return None
    shape = [1 if at in reduced else size for at, size in enumerate(tensor.shape) if keep or at not in reduced]
    return _empty(shape, dtype=kwargs.get("dtype") or tensor.dtype, device=_META)


#: Operators that return new tensors.
NEW: dict[str, Rule] = {
    **dict.fromkeys(("aten::mul", "aten::add", "aten::sub"), _binary),
    "aten::div": _division,
    **dict.fromkeys(
        (
            *("aten::neg", "aten::rsqrt", "aten::exp", "aten::tanh", "aten::sigmoid", "aten::silu", "aten::relu"),
            *("aten::abs", "aten::gelu", "aten::sqrt", "aten::sin", "aten::cos", "aten::log"),
        ),
        _unary,
    ),
    **dict.fromkeys(
        ("aten::tanh_backward", "aten::sigmoid_backward", "aten::silu_backward", "aten::gelu_backward"), _same
    ),
    "aten::threshold_backward": _same,
    "aten::pow": _power,
    "aten::addmm": _addmm,
    "aten::mm": _mm,
    "aten::native_dropout": _native_dropout,
    "aten::native_dropout_backward": _dropout_backward,
    "aten::native_group_norm": _group_norm,
    "aten::_softmax": _last_dim_softmax,
    "aten::_log_softmax": _last_dim_softmax,
    **dict.fromkeys(("aten::zeros_like", "aten::empty_like"), _made_like),
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::slice_backward": _slice_backward,
    **dict.fromkeys(("aten::clone", "aten::_to_copy"), _copy),
}

#: Updates in place; an optimizer that steps parameter by parameter makes thousands.
UPDATES: dict[str, Rule] = dict.fromkeys(
    (
        *("aten::mul_", "aten::add_", "aten::sub_", "aten::div_", "aten::lerp_", "aten::addcmul_", "aten::addcdiv_"),
        "aten::copy_",
    ),
    _in_place,
)

#: Initialisation of weights that have no memory: nothing to do, nothing to check.
FILLED: frozenset[str] = frozenset(
    {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::bernoulli_"}
)


def rule_for(func: Any) -> Rule | None:
    """The direct rule for an operator, or None."""
    name: str = func._schema.name
    if func._overloadname == "dtype":
        return _baddbmm_to_dtype if name == "aten::baddbmm" else None
    if func._overloadname in ("out", "Tensor_mode", "Scalar_mode"):
        return None
    return NEW.get(name) or UPDATES.get(name)
