"""Symbolic tensors: plain meta tensors, told apart from real ones whatever device they claim to be on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vram_guard.tensors import is_dense, tensors_in

_is_meta: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


def is_symbolic(tensor: torch.Tensor) -> bool:
    """True if a tensor is symbolic: torch's own answer, which neither the simulated device nor a mode replaces."""
    if torch._C._is_torch_function_mode_enabled():  # as after ``torch.set_default_device``, which is a mode
        with torch._C.DisableTorchFunction():
            return _is_meta(tensor)
    return _is_meta(tensor)


def any_symbolic(values: Any) -> bool:
    """True if any tensor among an operator's arguments is symbolic."""
    return any(is_symbolic(tensor) for tensor in tensors_in(values))


def symbolic_like(tensor: torch.Tensor) -> torch.Tensor:
    """A symbolic tensor of this shape; with its strides where they leave no gaps, as ``Tensor.to`` keeps them."""
    if is_dense(tensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")


def address_of(tensor: torch.Tensor) -> int:
    """``Tensor.data_ptr``: symbolic tensors have none, but one tells them apart."""
    address: int = torch._C.TensorBase.data_ptr(tensor)
    if not is_symbolic(tensor) or hasattr(tensor, "__tensor_flatten__"):
        return address
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size())
