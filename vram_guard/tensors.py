"""Facts about tensors, and walks over the tensors among an operator's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vram_guard.state.containers import leaves


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Inside the block operators and functions of torch run for real: no trace sees them, no default device is used."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001 - see simulate/private_api.py
        yield


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill their stretch of memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def version_of(tensor: torch.Tensor) -> int:
    """The number of times that the tensor was written in place; -1 where nothing counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - named in autograd's documentation


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the tensor's storage; -1 where it has none (sparse tensors, those that wrap others)."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return -1
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see simulate/private_api.py


def tensors_of(part: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in leaves(part) if isinstance(leaf, torch.Tensor)]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments of an operator, which nest in lists and tuples only.

    Every operator of a trace passes here; ``torch.utils._pytree``, which also knows dicts and registered classes, is
    slower.
    """
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def map_tensors_in(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """An argument of an operator with ``function`` applied to its tensors, in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors_in(function, item) for item in value)
    return value


def inner_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that a wrapper holds (8-bit states)."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def tensors_kept(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors that a value holds: in a wrapper, in containers, in attributes of an object (a preconditioner)."""
    if isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        yield from inner_tensors(value)
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_kept(one, depth - 1)
    elif depth and isinstance(value, dict):
        yield from tensors_kept(list(value.values()), depth)
    elif depth and not isinstance(value, type) and hasattr(value, "__dict__") and not callable(value):
        yield from tensors_kept(vars(value), depth - 1)
