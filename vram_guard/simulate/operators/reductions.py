"""Temporaries of reductions: the input in the type that is reduced, and the parts of thread blocks (Reduce.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from vram_guard.scratch import Part, Reduction, reduced_iterator
from vram_guard.simulate.memory.recorder import Recorder

_HALVES = (torch.float16, torch.bfloat16)
_WIDTHS = {torch.float16: 4, torch.bfloat16: 4}
_NO_DIMS: tuple[int, ...] = ()


def _sums(dtype: torch.dtype) -> int:
    """Halves are summed in float32 (ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu)."""
    return _WIDTHS.get(dtype, dtype.itemsize)


def _itself(dtype: torch.dtype) -> int:
    """ReduceMaxValuesKernel.cu, ReduceLogicKernel.cu."""
    return dtype.itemsize


def _with_index(_dtype: torch.dtype) -> int:
    """A pair of a value of up to 8 bytes and an index of 8 (``max_launch_kernel``, ReduceArgMaxKernel.cu)."""
    return 16


def _pair(dtype: torch.dtype) -> int:
    """ReduceAMinMaxKernel.cu."""
    return 2 * dtype.itemsize


def _welford(dtype: torch.dtype) -> int:
    """``WelfordData``: mean, squares and count in the accumulation type, and the count as int32 (SharedReduceOps.h)."""
    return 32 if dtype == torch.float64 else 16


#: Operator -> bytes in which a thread gathers, from the type that is reduced.
REDUCTIONS: dict[str, Callable[[torch.dtype], int]] = {
    **dict.fromkeys(
        ("aten::sum", "aten::nansum", "aten::mean", "aten::prod", "aten::linalg_vector_norm", "aten::norm"), _sums
    ),
    **dict.fromkeys(("aten::amax", "aten::amin", "aten::any", "aten::all"), _itself),
    **dict.fromkeys(("aten::argmax", "aten::argmin"), _with_index),
    **dict.fromkeys(("aten::max", "aten::min"), _with_index),
    "aten::aminmax": _pair,
    **dict.fromkeys(("aten::var", "aten::std", "aten::var_mean", "aten::std_mean"), _welford),
}


def reduction(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """The temporaries of a reduction that was run on symbolic tensors."""
    name, dims_at, dtype_matters = _signature(func)
    source = args[0]
    first = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(first, torch.Tensor) or source.numel() == 0:
        return
    dims = _NO_DIMS if dims_at is None else kwargs.get("dim", args[dims_at] if len(args) > dims_at else None)
    if name in ("aten::max", "aten::min") and dims_at is None:
        if len(args) > 1:
            return  # of two tensors, element by element
        gathered: Callable[[torch.dtype], int] = _itself
    else:
        gathered = REDUCTIONS[name]
    reduced_as = _reduced_as(source.dtype, first.dtype) if dtype_matters else source.dtype
    record(recorder, source, dims, str(func), reduced_as, gathered(reduced_as), first.dtype)


def record(
    recorder: Recorder,
    source: torch.Tensor,
    dims: int | Collection[int] | None,
    operator: str,
    reduced_as: torch.dtype,
    gathered: int,
    result: torch.dtype,
) -> None:
    """Record the temporaries of one reduction of ``source`` over ``dims`` (all, where there are none)."""
    count = source.dim()
    chosen = [dims] if isinstance(dims, int) else dims or range(count)
    reduced = {dim % count for dim in chosen} if count else set()
    copied = source.numel() * reduced_as.itemsize if reduced_as != source.dtype else 0
    strides = source.stride() if not copied else torch.empty_like(source, device="meta").stride()
    offset = 0 if copied else source.storage_offset()
    iterated = reduced_iterator(source.shape, strides, reduced)
    numbers = [int(offset), *(dim.size for dim in iterated), *(dim.stride for dim in iterated)]
    reduced_dims = sum(dim.out_stride == 0 for dim in iterated)
    parts: list[Part] = ["buffer", "semaphores"]
    if gathered > result.itemsize and (gathered > 8 or reduced_as == result):
        parts.insert(0, "accumulator")
    rules = [Reduction(part, reduced_dims, reduced_as.itemsize, gathered) for part in parts]
    recorder.scratch(rules, numbers, operator, copied=copied)


def column_sum(recorder: Recorder, source: torch.Tensor, dims: Collection[int], operator: str) -> None:
    """The temporaries of a sum inside another operator's kernel (``grad.sum(...)`` of a bias)."""
    record(recorder, source, dims, operator, source.dtype, _sums(source.dtype), source.dtype)


@functools.cache
def _signature(func: Any) -> tuple[str, int | None, bool]:
    """Name; position of ``dim``, None where it has none; whether the input is first made the result's type."""
    names = [argument.name for argument in func._schema.arguments]
    name = func._schema.name
    dims_at = names.index("dim") if "dim" in names else None
    return name, dims_at, name in ("aten::sum", "aten::nansum", "aten::mean", "aten::prod")


def _reduced_as(source: torch.dtype, result: torch.dtype) -> torch.dtype:
    """ReduceOpsUtils.h, ``make_reduction``: the input becomes the result's type, but for halves summed to float32."""
    return source if source in _HALVES and result == torch.float32 else result
