"""``torch.cuda.FloatTensor`` and its kind, which torch leaves without a constructor where it finds no GPU.

A stand-in makes its tensors with torch's own factories on the device "cuda": whoever simulates that device answers.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import torch

#: Prefixes of the names of types, as ``Tensor.type()`` has them, and their device.
_PREFIXES = {"torch.cuda.": "cuda", "torch.": "cpu"}


class TypeMeaning(NamedTuple):
    """The meaning of a tensor type."""

    device: str
    """ "cuda" or "cpu"."""
    dtype: torch.dtype


class _CudaType(type):
    """Metaclass of the stand-ins, which no tensor has for its class."""

    dtype: torch.dtype

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, torch.Tensor) and thing.is_cuda and thing.dtype is cls.dtype

    def __call__(cls, *given: Any, device: Any = "cuda") -> Any:
        """A tensor of sizes (its memory as it was found), of values, or another tensor of this type itself."""
        if all(isinstance(one, Integral) for one in given):
            return torch.empty(tuple(map(int, given)) if given else (0,), dtype=cls.dtype, device=device)
        (first,) = given
        if isinstance(first, torch.Size):
            return torch.empty(first, dtype=cls.dtype, device=device)
        if not isinstance(first, torch.Tensor):
            return torch.tensor(first, dtype=cls.dtype, device=device)
        if not cls.__instancecheck__(first):  # torch's own words
            raise TypeError(f"expected {cls.__module__}.{cls.__name__} (got {first.type()})")
        return first.view_as(first)


def _stand_in(name: str) -> _CudaType:
    real = getattr(torch, name)
    fields = {"dtype": real.dtype, "layout": torch.strided, "is_cuda": True, "is_sparse": False}
    return _CudaType(name, (), {**fields, "__module__": "torch.cuda", "__doc__": f"Stands for torch.cuda.{name}."})


_KINDS = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")

#: Names of ``torch.cuda`` -> what stands there.
CUDA_TYPES: dict[str, Any] = {f"{kind}Tensor": _stand_in(f"{kind}Tensor") for kind in _KINDS}
_DTYPES: dict[str, torch.dtype] = {name: one.dtype for name, one in CUDA_TYPES.items()}
_BY_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}


def meaning_of(kind: Any) -> TypeMeaning | None:
    """The meaning of a tensor type; None for what is none of this kind.

    Args:
        kind: ``torch.cuda.FloatTensor``, ``torch.FloatTensor``, or the name of one.

    Example:
        >>> meaning_of("torch.cuda.HalfTensor")
        TypeMeaning(device='cuda', dtype=torch.float16)
        >>> meaning_of(torch.float16)
    """
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else ""
    device = next((device for prefix, device in _PREFIXES.items() if name.startswith(prefix)), None)
    dtype = _DTYPES.get(name.rpartition(".")[2])
    return None if device is None or dtype is None else TypeMeaning(device, dtype)


def type_on_gpu(dtype: torch.dtype) -> str:
    """``Tensor.type()`` of a tensor on the GPU.

    Example:
        >>> type_on_gpu(torch.int64)
        'torch.cuda.LongTensor'
    """
    return f"torch.cuda.{_BY_DTYPE.get(dtype, 'Tensor')}"


def default_type_setter(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``torch.set_default_tensor_type`` that knows the stand-ins: the default dtype and the default device together.

    Args:
        original: torch's own.
    """

    def set_default_tensor_type(t: Any) -> None:
        meant = meaning_of(t)
        if meant is None or (meant.device == "cpu" and torch.get_default_device().type == "cpu"):
            original(t)
            return
        torch.set_default_dtype(meant.dtype)
        torch.set_default_device(meant.device)

    return set_default_tensor_type
