"""Roll back the effects of a failed attempt at a batch outside of gradients.

Rolled back are the random number generators of Python, NumPy and torch, and the state of the modules: buffers
(BatchNorm's running statistics), metrics' states, plain attributes, lists that grew. Parameters are not copied: an
attempt that changes them cannot be rolled back, which is detected and reported.

An attempt's start costs about a microsecond per module, and a copy of the buffers: one kernel per dtype for
those up to 1 MiB each, a copy on the host for larger ones, and for large ones that have not changed from one batch
to the next (masks, tables) only a look at their version counter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vram_guard.language import _
from vram_guard.state.containers import MUTABLE, alike, look
from vram_guard.state.modules import ModuleState
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import version_of

#: Tensors up to so many bytes are copied where they are; larger ones to the host, and only while they change.
COPIED_IN_PLACE = 2**20
#: Lists longer than this are only cut back to their length, not compared; dicts and sets are not looked into.
LOOKED_INTO = 64

#: What every module has: looked at by identity alone, for looking into a dozen hook tables a module takes long.
_EVERY_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
_IMMUTABLE = (int, float, bool, str, bytes, tuple, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class CannotRollBackError(Exception):
    """The attempt changed something of which there is no copy; the message says what."""


class StateSnapshot:
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
            kept = _Module(module, tensors, generators)
            own = kept.attributes["_parameters"].values()
            self._parameters += [(parameter, version_of(parameter)) for parameter in own if parameter is not None]
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
        """Check that the attempt can be rolled back.

        Raises:
            CannotRollBackError: it changed parameters, or a large tensor that never changed before.
        """
        for parameter, before in self._parameters:
            if version_of(parameter) != before:
                names = [name for name, known in self._model.named_parameters() if known is parameter]
                raise CannotRollBackError(
                    _(
                        "the weights of {names} were already changed during forward or backward",
                        names=", ".join(names),
                    )
                )
        for tensor, before in self._quiet:
            if version_of(tensor) != before:
                self._known.clear()  # from now on it is copied
                raise CannotRollBackError(
                    _(
                        "a buffer of shape {shape} that had never changed before was changed",
                        shape=tuple(tensor.shape),
                    )
                )

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what changes inside the block when the attempt is rolled back (hooks that run once a batch)."""
        attributes = [dict(vars(kept.module)) for kept in self._modules]
        contents = [[look(container, LOOKED_INTO) for container, _before in kept.contents] for kept in self._modules]
        parameters = [version_of(parameter) for parameter in self.parameters]
        copied = [[version_of(tensor) for tensor in tensors] for tensors, _ in self._copies]
        hosted = [version_of(tensor) for tensor, _ in self._on_host]
        yield
        for kept, known, looks in zip(self._modules, attributes, contents, strict=True):
            kept.follow(known, looks)
        self._parameters = [
            (parameter, base + version_of(parameter) - before)
            for (parameter, base), before in zip(self._parameters, parameters, strict=True)
        ]
        for (tensors, flat), versions in zip(self._copies, copied, strict=True):
            pieces = flat.split([tensor.numel() for tensor in tensors])
            for tensor, piece, seen in zip(tensors, pieces, versions, strict=True):
                if version_of(tensor) != seen:
                    piece.copy_(tensor.detach().reshape(-1))
        for (tensor, copy), seen in zip(self._on_host, hosted, strict=True):
            if version_of(tensor) != seen:
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
            self._known[id(tensor)] = (tensor, version_of(tensor))
            if last is not None and last[0] is tensor and last[1] == version_of(tensor):
                self._quiet.append((tensor, version_of(tensor)))
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


class _Module(ModuleState):
    """One module; containers are looked into as far as that costs little for every batch.

    Args:
        module: whose.
        tensors: buffers and other tensors of its attributes are added here, by id.
        generators: generators among its attributes are added here.
    """

    def __init__(self, module: nn.Module, tensors: dict[int, torch.Tensor], generators: list[torch.Generator]) -> None:
        super().__init__(module, [])
        for name, value in self.attributes.items():
            if value is None or name in _EVERY_MODULES or isinstance(value, _IMMUTABLE):
                continue
            items: Iterable[Any] = ()
            if isinstance(value, MUTABLE) and (len(value) <= LOOKED_INTO or isinstance(value, list)):
                self.contents.append((value, look(value, LOOKED_INTO)))
            if isinstance(value, (list, dict)) and len(value) <= LOOKED_INTO:
                items = [item for item in _items(value) if isinstance(item, torch.Tensor)]
            for part in (value, *items):
                if isinstance(part, torch.Generator):
                    generators.append(part)
                elif isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    tensors[id(part)] = part

    def follow(self, before: dict[str, Any], contents: list[Any]) -> None:
        """Remember what has changed since, instead of what it was."""
        own = vars(self.module)
        for name in before.keys() | own.keys():
            if name not in own:
                self.attributes.pop(name, None)
            elif before.get(name, self) is not own[name]:
                self.attributes[name] = own[name]
        for at, (container, _before) in enumerate(self.contents):
            now = look(container, LOOKED_INTO)
            if not alike(now, contents[at]):
                self.contents[at] = (container, now)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
