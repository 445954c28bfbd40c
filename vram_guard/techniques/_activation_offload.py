"""Activation offload: what autograd saves in the forward pass is kept in host memory until the backward pass.

``torch.autograd.graph.save_on_cpu`` with three differences: weights and buffers, which the GPU holds anyway, are left
where they are; what several operators save is copied once; and pinned copies, too, come back with the strides of what
they were made from, unless that had gaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vram_guard.techniques.patched_forward import PatchedForward, patch_forwards
from vram_guard.tensors import is_dense, version_of

#: The type of device whose tensors are left where they are, see :mod:`vram_guard.techniques.cpu_as_gpu`.
_HOST = "cpu"


def offload_activations(model: nn.Module, names: Iterable[str], *, pin_memory: bool = True) -> Callable[[], None]:
    """From now on the named modules keep in host memory what their forwards save for the backward pass.

    Results and gradients are those of the model as written. A checkpointed module inside a named one has its inputs
    moved, and nothing else, for nothing else is saved.

    Args:
        model: any module; it is changed in place.
        names: modules as in ``model.named_modules()``; "" is the model itself, where its forward is what is called.
        pin_memory: copies go to page-locked memory and do not hold the GPU up. CUDA's allocator for it rounds every
            size up to a power of two.

    Returns:
        A function that puts the model's own forwards back.

    Raises:
        InvalidInputError: no module has such a name; nothing was changed.
    """
    return patch_forwards(model, names, partial(Offloaded, copies=_Copies(pin_memory)))


class Offloaded(PatchedForward):
    """A module's forward whose saved tensors go to host memory."""

    def __init__(self, module: nn.Module, copies: _Copies) -> None:
        super().__init__(module)
        self._copies = copies

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results."""
        if not torch.is_grad_enabled():
            return self.as_written(*args, **kwargs)
        resident = {id(buffer.untyped_storage()) for buffer in self.module.buffers() if buffer.layout == torch.strided}
        pack = partial(_pack, self._copies, resident)
        with saved_tensors_hooks(pack, _unpack):
            return self.as_written(*args, **kwargs)


class _Left:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an operator that saves its own result would otherwise keep itself alive.
        self.tensor = tensor.detach()
        self.version = version_of(tensor)

    def back(self) -> torch.Tensor:
        # Autograd makes this check itself only where it holds the tensor itself.
        if version_of(self.tensor) != self.version:
            raise RuntimeError(  # in autograd's words
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(self.tensor.shape)} is at version {version_of(self.tensor)}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


class _Moved:
    """A copy in host memory of a tensor, or of the stretch of memory that several tensors are views of."""

    __slots__ = ("__weakref__", "device", "host", "pinned", "source")

    def __init__(self, tensor: torch.Tensor, pinned: bool) -> None:
        self.device = tensor.device
        self.pinned = pinned
        self.source = weakref.ref(tensor.untyped_storage())
        self.host = torch.empty_like(
            tensor, device="cpu", pin_memory=pinned, memory_format=torch.contiguous_format, requires_grad=False
        )
        self.host.copy_(tensor, non_blocking=pinned)

    def back(self) -> torch.Tensor:
        return self.host.to(self.device, non_blocking=self.pinned, copy=True)  # also where the CPU stands for a GPU


class _SavedView:
    """One saved tensor and where it lies in a copied stretch of memory."""

    __slots__ = ("moved", "shape", "strides")

    def __init__(self, moved: _Moved, tensor: torch.Tensor) -> None:
        self.moved = moved
        self.shape = tensor.shape
        self.strides = tensor.stride()

    def back(self) -> torch.Tensor:
        return self.moved.back().as_strided(self.shape, self.strides)


class _Elsewhere:
    """A copy of a tensor that is not a plain stretch of memory: sparse, conjugated, a subclass."""

    __slots__ = ("device", "host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.host = tensor.detach().cpu()

    def back(self) -> torch.Tensor:
        return self.host.to(self.device)


_Packed = _Left | _Moved | _SavedView | _Elsewhere


class _Copies:
    """Copies that are still needed, by the memory that they were copied from."""

    def __init__(self, pin_memory: bool) -> None:
        self.pin_memory = pin_memory
        self._moved: weakref.WeakValueDictionary[tuple[Any, ...], _Moved] = weakref.WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        return _Copies(self.pin_memory)

    def of(self, tensor: torch.Tensor) -> _Packed:
        """The tensor in host memory; made now unless its memory was copied before, and not written since."""
        if is_dense(tensor):
            stretch = tensor.detach().as_strided((tensor.numel(),), (1,))
            return _SavedView(self._copied(stretch), tensor)
        return self._copied(tensor.detach())

    def _copied(self, tensor: torch.Tensor) -> _Moved:
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor))
        key = (id(tensor.untyped_storage()), *place)
        known = self._moved.get(key)
        if known is not None and known.source() is tensor.untyped_storage():
            return known
        pinned = self.pin_memory and tensor.device.type != "cpu" and torch.cuda.is_available()
        made = self._moved[key] = _Moved(tensor, pinned)
        return made


def _pack(copies: _Copies, resident: set[int], tensor: torch.Tensor) -> _Packed:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return _Elsewhere(tensor)
    if (
        tensor.device.type == _HOST
        or tensor.numel() == 0
        or _is_weight(tensor)
        or id(tensor.untyped_storage()) in resident
    ):
        return _Left(tensor)
    if tensor.is_conj() or tensor.is_neg():
        return _Elsewhere(tensor)
    return copies.of(tensor)


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.back()


def _is_weight(tensor: torch.Tensor) -> bool:
    """True if this is a parameter or a view of one (``weight.t()``)."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)  # noqa: SLF001 - as above
