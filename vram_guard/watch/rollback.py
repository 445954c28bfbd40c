"""What a broken attempt at a batch leaves behind outside of gradients, and taking it back.

Taken back are the random number generators of Python, NumPy and torch, and the state of the modules: buffers
(BatchNorm's running statistics), metrics' states, plain attributes, lists that grew. Parameters are not copied: an
attempt that changes them cannot be taken back, which is noticed and said.

An attempt's start costs about a microsecond per module, and a copy of the buffers: one kernel per dtype for
those up to 1 MiB each, a copy on the host for larger ones, and for large ones that have not changed from one batch
to the next (masks, tables) only a look at their version counter.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: Tensors up to so many bytes are copied where they are; larger ones to the host, and only while they change.
COPIED_IN_PLACE = 2**20
#: Lists longer than this are only cut back to their length, not compared; dicts and sets are not looked into.
LOOKED_INTO = 64


#: What every module has: looked at by identity alone, for looking into a dozen hook tables a module takes long.
_EVERY_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
_IMMUTABLE = (int, float, bool, str, bytes, tuple, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class CannotRollBackError(Exception):
    """The attempt changed something of which there is no copy; the message says what."""


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place (autograd's own counter); -1 where nothing counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - named in autograd's documentation


class RandomState:
    """The state of every process-wide random number generator, and of those that are handed in."""

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy_module = sys.modules.get("numpy")
        self._numpy = self._numpy_module.random.get_state() if self._numpy_module is not None else None
        self._torch = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """All of them as they were."""
        random.setstate(self._python)
        if self._numpy_module is not None:
            self._numpy_module.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        for generator, state in self._generators:
            generator.set_state(state)


@dataclass
class _Module:
    """One module's attributes, and what its containers hold."""

    module: nn.Module
    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]] = field(default_factory=list)

    def restore(self) -> None:
        own = vars(self.module)
        for name in [name for name in own if name not in self.attributes]:
            del own[name]
        for name, value in self.attributes.items():
            if own.get(name, self) is not value:
                own[name] = value
        for container, content in self.containers:
            _refill(container, content)

    def follow(self, before: dict[str, Any], contents: list[Any]) -> None:
        """Remember what has changed since, instead of what it was."""
        own = vars(self.module)
        for name in before.keys() | own.keys():
            if name not in own:
                self.attributes.pop(name, None)
            elif before.get(name, self) is not own[name]:
                self.attributes[name] = own[name]
        for at, (container, _) in enumerate(self.containers):
            now = _look(container)
            if not _alike(now, contents[at]):
                self.containers[at] = (container, now)


class StateKeeper:
    """Remembers the state before each attempt; one per training, for it learns which tensors never change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[_Module] = []
        self._random: RandomState | None = None
        self._parameters: list[tuple[nn.Parameter, int]] = []
        self._copies: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._quiet: list[tuple[torch.Tensor, int]] = []
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        """Large tensors of the last attempt by id, with the version they had."""

    def take(self) -> None:
        """Remember the state as it is now."""
        self.forget()
        tensors: dict[int, torch.Tensor] = {}
        generators: list[torch.Generator] = []
        for module in self._model.modules():
            kept = _Module(module, dict(vars(module)))
            for name, value in kept.attributes.items():
                if value is not None and name not in _EVERY_MODULES and not isinstance(value, _IMMUTABLE):
                    _note(value, kept, tensors, generators)
            own = kept.attributes["_parameters"].values()
            self._parameters += [(parameter, version(parameter)) for parameter in own if parameter is not None]
            self._modules.append(kept)
        self._copy(tensors.values())
        self._random = RandomState({parameter.device for parameter, _ in self._parameters}, generators)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the remembered state; tied ones as often as they are found."""
        return [parameter for parameter, _ in self._parameters]

    def forget(self) -> None:
        """Let go of everything that was remembered."""
        self._modules, self._random, self._parameters = [], None, []
        self._copies, self._on_host, self._quiet = [], [], []

    def check(self) -> None:
        """Whether the attempt can be taken back.

        Raises:
            CannotRollBackError: it changed parameters, or a large tensor that never changed before.
        """
        for parameter, before in self._parameters:
            if version(parameter) != before:
                names = [name for name, known in self._model.named_parameters() if known is parameter]
                raise CannotRollBackError(
                    f"the weights of {', '.join(names)} were already changed during forward or backward"
                )
        for tensor, before in self._quiet:
            if version(tensor) != before:
                self._known.clear()  # from now on it is copied
                raise CannotRollBackError(
                    f"a buffer of shape {tuple(tensor.shape)} that had never changed before was changed"
                )

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """What changes inside the block stays so when the attempt is taken back (hooks that run once a batch)."""
        attributes = [dict(vars(kept.module)) for kept in self._modules]
        contents = [[_look(container) for container, _ in kept.containers] for kept in self._modules]
        parameters = [version(parameter) for parameter in self.parameters]
        copied = [[version(tensor) for tensor in tensors] for tensors, _ in self._copies]
        hosted = [version(tensor) for tensor, _ in self._on_host]
        yield
        for kept, known, looks in zip(self._modules, attributes, contents, strict=True):
            kept.follow(known, looks)
        self._parameters = [
            (parameter, base + version(parameter) - before)
            for (parameter, base), before in zip(self._parameters, parameters, strict=True)
        ]
        for (tensors, flat), versions in zip(self._copies, copied, strict=True):
            pieces = flat.split([tensor.numel() for tensor in tensors])
            for tensor, piece, seen in zip(tensors, pieces, versions, strict=True):
                if version(tensor) != seen:
                    piece.copy_(tensor.detach().reshape(-1))
        for (tensor, copy), seen in zip(self._on_host, hosted, strict=True):
            if version(tensor) != seen:
                copy.copy_(tensor.detach())

    @torch.no_grad()
    def restore(self) -> None:
        """The state as it was when :meth:`take` was called; it stays remembered until the next one."""
        for kept in self._modules:
            kept.restore()
        for tensors, flat in self._copies:
            for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
        for tensor, copy in self._on_host:
            tensor.copy_(copy)
        if self._random is not None:
            self._random.restore()

    @torch.no_grad()
    def _copy(self, tensors: Iterable[torch.Tensor]) -> None:
        small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        known, self._known = self._known, {}
        for tensor in tensors:
            if tensor.is_inference() or tensor.layout is not torch.strided or tensor.device.type == "meta":
                continue  # cannot be changed in place, or holds nothing
            if tensor.nbytes <= COPIED_IN_PLACE:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
                continue
            last = known.get(id(tensor))
            self._known[id(tensor)] = (tensor, version(tensor))
            if last is not None and last[0] is tensor and last[1] == version(tensor):
                self._quiet.append((tensor, version(tensor)))
            else:
                self._on_host.append((tensor, tensor.detach().to("cpu", copy=True)))
        for key, group in small.items():
            self._copies.append((group, self._gather(key, group)))

    def _gather(self, key: tuple[torch.dtype, torch.device], group: list[torch.Tensor]) -> torch.Tensor:
        """All of them in one flat tensor, which is kept from one attempt to the next: no allocation, one kernel."""
        total = sum(tensor.numel() for tensor in group)
        flat = self._flat.get(key)
        if flat is None or flat.numel() != total:
            flat = self._flat[key] = torch.empty(total, dtype=key[0], device=key[1])
        torch.cat([tensor.detach().reshape(-1) for tensor in group], out=flat)
        return flat


def _note(
    value: Any, kept: _Module, tensors: dict[int, torch.Tensor], generators: list[torch.Generator], *, deep: bool = True
) -> None:
    """What has to be remembered of one attribute beside the reference to it."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            tensors[id(value)] = value
    elif isinstance(value, torch.Generator):
        generators.append(value)
    elif isinstance(value, (list, dict, set, deque)) and (len(value) <= LOOKED_INTO or isinstance(value, list)):
        kept.containers.append((value, _look(value)))
    if deep and isinstance(value, (list, dict)) and 0 < len(value) <= LOOKED_INTO:
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, torch.Tensor):
                _note(item, kept, tensors, generators, deep=False)


def _look(container: Any) -> Any:
    """A copy of what a container holds; of a long list, its length."""
    return len(container) if isinstance(container, list) and len(container) > LOOKED_INTO else container.copy()


def _alike(one: Any, other: Any) -> bool:
    """Whether two looks at a container found the same."""
    if isinstance(one, int) or isinstance(other, int):
        return bool(type(one) is type(other) and one == other)
    return _same(one.items(), other.items()) if isinstance(one, dict) else _same(one, other)


def _refill(container: Any, content: Any) -> None:
    """Give a container the content it had; one that has it already is not touched."""
    if isinstance(content, int):
        del container[content:]
    elif isinstance(container, dict):
        if not _same(container.items(), content.items()):
            container.clear()
            container.update(content)
    elif not _same(container, content):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether two containers hold the same objects in the same order, without comparing tensors."""
    one, other = list(_flattened(now)), list(_flattened(before))
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _flattened(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) is tuple:
            yield from item
        else:
            yield item
