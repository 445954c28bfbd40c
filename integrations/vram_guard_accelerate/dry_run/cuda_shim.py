"""The dry run until ``Accelerator.prepare``: the script's own code runs for real, on the CPU, with a simulated GPU.

Models are built and loaded with real values, because their constructors may read them. What the script moves to the GPU
stays where it is and is remembered: from ``prepare`` on it is symbolic.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vram_guard.patching import replaced
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.device.cuda_module import CUDA, accelerator_answers, cuda_answers, while_active
from vram_guard.simulate.device.fake_cuda import as_device, device_by_default, named_by_number
from vram_guard.simulate.device.import_guard import imports_run_for_real
from vram_guard.simulate.device.tensor_types import CUDA_TYPES, default_type_setter, meaning_of, type_on_gpu
from vram_guard.state.containers import leaves
from vram_guard.user_code import is_users_file
from vram_guard_accelerate.dry_run._loads import Loads, is_gpu

# ruff: noqa: SLF001 - a storage has one key, and it is private


_TENSOR: Any = torch.Tensor

#: Where a tensor is, as it is asked; answers of one on the GPU.
_WHERE: tuple[tuple[Any, Any], ...] = (
    (_TENSOR.device.__get__, CUDA),
    (_TENSOR.is_cuda.__get__, True),
    (_TENSOR.is_cpu.__get__, False),
    (_TENSOR.get_device, 0),
)


class CudaShim(TorchFunctionMode):
    """Turns "cuda" into the CPU in every call, and remembers which memory was meant to be on the GPU.

    Args:
        capability: of the simulated GPU.
        memory: its bytes.
    """

    def __init__(self, capability: tuple[int, int], memory: int) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.active = False
        """Off while a module is imported: what it finds out then, it keeps."""
        self._answers = {
            name: while_active(self, answer, getattr(torch.cuda, name))
            for name, answer in cuda_answers(Capability(capability), memory).items()
        }
        self._on_accelerator = {
            name: while_active(self, answer, getattr(torch.accelerator, name))
            for name, answer in accelerator_answers().items()
        }
        self._moved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._whole: set[int] = set()
        """Storages that are as large there as they are here; of others, each tensor is moved by itself."""
        self.loads = Loads(self._arrived)
        self._used = self._begun = False

    @property
    def used(self) -> bool:
        """True once something was meant to be on the GPU."""
        return self._used

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if this tensor is meant to be on the GPU."""
        return _key(tensor) in self._moved

    def begin(self) -> None:
        """From here on the script finds a GPU; called again, it does nothing."""
        if self._begun:
            return
        self._begun = True
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads of Transformers that load weights would find no GPU
        self._stack.enter_context(replaced(torch.cuda, self._answers))
        if hasattr(torch, "accelerator"):
            self._stack.enter_context(replaced(torch.accelerator, self._on_accelerator))
        self._stack.enter_context(replaced(torch.cuda, CUDA_TYPES))
        own = torch.set_default_tensor_type
        setter = while_active(self, default_type_setter(own), own)
        self._stack.enter_context(replaced(torch, {"set_default_tensor_type": setter}))
        recorded = while_active(self, lambda *_: None, torch.Tensor.record_stream)  # what lies on the CPU has no stream
        self._stack.enter_context(replaced(torch.Tensor, {"record_stream": recorded}))
        self._stack.enter_context(self.loads.followed())
        torch.Generator = _CpuGenerator  # type: ignore[misc] # permanently: scripts seed on their device
        self._stack.enter_context(imports_run_for_real(self, excepted=is_users_file))
        self.active = True
        self._stack.enter_context(self)

    def moved(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors that are meant to be on the GPU."""
        return [tensor for tensor in tensors if self.holds(tensor)]

    def shared(self) -> frozenset[int]:
        """Storages of which several tensors on the GPU may be parts (``_cdata``)."""
        return frozenset(self._whole)

    def end(self) -> None:
        """No more of it."""
        self._stack.close()
        self._moved = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = named_by_number(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "_parse_to"):  # a number is that of a GPU
            args = tuple(map(_numbered, args))
        elif func is torch.device:  # as device maps name theirs
            args = (*map(_numbered, args[:1]), *args[1:])
        if func is torch.device or name == "_parse_to":  # names only: nothing moves yet
            return func(*args, **kwargs)
        if name == "cuda":
            self._remember(args[0])
            return args[0]
        if name == "type":
            return self._of_type(func, *args, **kwargs)
        if name in ("pin_memory", "is_pinned"):  # there is no driver that could pin it
            return args[0] if name == "pin_memory" else False
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if name in ("__get__", "get_device"):
            return self._device_shown(func, args, kwargs)
        to_gpu = [is_gpu(value) for value in args]
        # After torch.set_default_device("cuda") torch itself would name it, further down.
        named = is_gpu(kwargs.get("device")) or is_gpu(device_by_default(func, kwargs.get("device")))
        if not named and not any(to_gpu):
            return self._derived(func, args, kwargs)
        args = tuple(torch.device("cpu") if gpu else value for gpu, value in zip(to_gpu, args, strict=True))
        out = func(*args, **{**kwargs, "device": torch.device("cpu")} if named else kwargs)
        self._remember(out)
        return out

    def _of_type(self, func: Any, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.type``: the name of its type, or the tensor as another one, on the device of that type."""
        if dtype is None:
            return type_on_gpu(tensor.dtype) if self.holds(tensor) else func(tensor, **kwargs)
        meant = meaning_of(dtype)
        if meant is None:
            return self._derived(func, (tensor, dtype, *args), kwargs)
        return tensor.to(torch.device(meant.device), meant.dtype, *args, **kwargs)

    def _device_shown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where a tensor is; a loss that is made before the loop keeps the device of the weights."""
        answer = next((answer for asked, answer in _WHERE if asked == func), None)
        held = answer is not None and self.holds(args[0])
        return answer if held else func(*args, **kwargs)

    def _derived(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is computed of tensors on the GPU lies there, unless it is moved to the CPU."""
        # Beside the tensor, deepcopy is given all copies that were made so far.
        asked = args[:1] if getattr(func, "__name__", "") == "__deepcopy__" else (args, kwargs)
        given = [value for value in leaves(asked) if isinstance(value, torch.Tensor)] if self._moved else []
        out = func(*args, **kwargs)
        if not any(map(self.holds, given)):
            return out
        if func is torch.Tensor.cpu or any(_is_cpu(value) for value in (*args, *kwargs.values())):
            return out.clone() if isinstance(out, torch.Tensor) and self.holds(out) else out
        for value in leaves(out):
            if not any(value is one for one in given):  # what is written to stays where it is
                self._remember(value)
        return out

    def _arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._remember(tensor)

    def _remember(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata

        def gone(ref: weakref.ref[torch.UntypedStorage]) -> None:
            if self._moved.get(key) is ref:  # the address may belong to another one by now
                del self._moved[key]
                self._whole.discard(key)

        self._used = True
        if key not in self._moved and tensor.nbytes == storage.nbytes():
            self._whole.add(key)
        self._moved[key] = weakref.ref(storage, gone)


def _numbered(value: Any) -> Any:
    return torch.device("cuda", value) if type(value) is int else value


_RealGenerator = torch.Generator


class _AsReal(type):
    """Metaclass that takes the real generators for its instances."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, _RealGenerator)


class _CpuGenerator(metaclass=_AsReal):
    """``torch.Generator``, which lies on the CPU whatever the device: its numbers are not used."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _RealGenerator(device="cpu" if is_gpu(device) else device)


def _is_cpu(value: Any) -> bool:
    named = as_device(value)
    return named is not None and named.type == "cpu"


def _key(tensor: torch.Tensor) -> int | None:
    try:
        key: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None  # sparse, quantised: there is no one storage
    return key
