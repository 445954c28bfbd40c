"""Files that a script loads onto the GPU: read into host memory, their tensors taken for those of the GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vram_guard.patching import replaced
from vram_guard.simulate.device.fake_cuda import as_device
from vram_guard.state.containers import leaves

# ruff: noqa: SLF001 - a storage has one key, and it is private


def is_gpu(value: Any) -> bool:
    """True for what names a GPU: a device, or its name."""
    if isinstance(value, str) and not value.startswith("cuda"):
        return False
    named = as_device(value)
    return named is not None and named.type == "cuda"


class Loads:
    """What was loaded onto the GPU.

    Args:
        arrive: called with the tensors of a file that would lie there.
    """

    def __init__(self, arrive: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self.arrive = arrive

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside the block such files can be loaded."""
        safetensors = sys.modules.get("safetensors.torch")
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch, {"load": self._torch_load(torch.load)}))
            if safetensors is not None:
                load = self._safetensors_load(safetensors.load_file)
                stack.enter_context(replaced(safetensors, {"load_file": load}))
            yield

    def _torch_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.load`` where nothing can be loaded onto a GPU."""

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            named = map_location is not None and not isinstance(map_location, dict) and not callable(map_location)
            if named and not is_gpu(map_location):
                return original(f, map_location, *args, **kwargs)
            onto: set[int] = set()

            def moved(storage: Any, *_where: Any, **_how: Any) -> Any:
                onto.add(storage._cdata)
                return storage

            def place(storage: Any, location: str) -> Any:
                made = map_location(storage, location) if callable(map_location) else None
                if made is not None:
                    return made
                onto_named = map_location.get(location, location) if isinstance(map_location, dict) else location
                return moved(storage) if is_gpu(map_location if named else onto_named) else storage

            with replaced(torch.UntypedStorage, {"cuda": moved}):
                made = original(f, place, *args, **kwargs)
            self.arrive(one for one in _tensors(made) if _storage(one) in onto)
            return made

        return load

    def _safetensors_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``safetensors.torch.load_file``, which makes each tensor and moves it."""

        def load(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            self.arrive(one for one in _tensors(made) if one.is_cuda)
            return made

        return load


def _tensors(loaded: Any) -> Iterator[torch.Tensor]:
    for leaf in leaves(loaded):
        if isinstance(leaf, nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _storage(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
