"""Roll back the effects of a failed attempt at a batch outside of gradients.

Rolled back are the random number generators of Python, NumPy and torch, and the state of the modules: buffers
(BatchNorm's running statistics), metrics' states, attributes, and what can be reached from these, see
:mod:`vram_guard.watch._reachable`. Parameters are not copied: an attempt that changes them cannot be rolled back,
which is detected and reported.

An attempt's start costs about a microsecond per module and per container or object that is reached, and a copy of the
buffers: one kernel per dtype for those up to 1 MiB each, a copy on the host for larger ones, and for large ones that
have not changed from one batch to the next (masks, tables) only a look at their version counter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vram_guard.language import _
from vram_guard.state.containers import alike, look, refill
from vram_guard.state.modules import ModuleState
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import version_of
from vram_guard.watch._reachable import Reached, Slots, attributes_of

#: Tensors up to so many bytes are copied where they are; larger ones to the host, and only while they change.
COPIED_IN_PLACE = 2**20


class CannotRollBackError(Exception):
    """The attempt changed something of which there is no copy; the message says what."""


class StateSnapshot:
    """Remembers the state before each attempt; one per training, for it learns which tensors never change.

    Args:
        model: everything that a batch changes, and what can be reached from it.
        frameworks: top-level packages whose objects are left alone.
    """

    def __init__(self, model: nn.Module, frameworks: Iterable[str] = ()) -> None:
        self._model = model
        self._frameworks = tuple(frameworks)
        self._modules: list[ModuleState | Slots] = []
        """Modules, and objects that are reached from them."""
        self._contents: list[tuple[object, object]] = []
        self._others: list[Callable[[], object]] = []
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
        found = Reached(self._model, self._frameworks)
        for module in self._model.modules():
            found.module(module)
        self._modules, self._contents, self._others = found.holders, found.contents, found.others
        self._parameters = [(parameter, version_of(parameter)) for parameter in found.parameters]
        self._copy(found.tensors.values())
        self._random = RandomState({parameter.device for parameter in found.parameters}, found.generators)

    def beyond(self) -> list[str]:
        """What could not be put back, in words: a name as Python writes it, and the kind of thing."""
        found = Reached(self._model, self._frameworks)
        for name, module in self._model.named_modules():
            found.module(module, (name,) if name else ())
        return [f"{_written(where)} ({kind})" for where, kind in found.beyond.items()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the remembered state; tied ones as often as they are found."""
        return [parameter for parameter, _ in self._parameters]

    def forget(self) -> None:
        """Let go of everything that was remembered."""
        self._modules, self._contents, self._others = [], [], []
        self._random, self._parameters = None, []
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
                        names=", ".join(names) or _("a module that is kept out of the model"),
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
        attributes = [attributes_of(kept.module) for kept in self._modules]
        contents = [_look(container, content) for container, content in self._contents]
        parameters = [version_of(parameter) for parameter in self.parameters]
        copied = [[version_of(tensor) for tensor in tensors] for tensors, _ in self._copies]
        hosted = [version_of(tensor) for tensor, _ in self._on_host]
        yield
        for kept, known in zip(self._modules, attributes, strict=True):
            _keep_changes(kept, known)
        for at, (container, content) in enumerate(self._contents):
            now = _look(container, content)
            if not alike(now, contents[at]):
                self._contents[at] = (container, now)
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
        for container, content in self._contents:
            refill(container, content)
        for put_back in self._others:
            put_back()
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


def _look(container: Any, content: Any) -> Any:
    """The content as it is now, in the form in which it was remembered."""
    return len(container) if isinstance(content, int) else look(container)


def _keep_changes(kept: ModuleState | Slots, before: dict[str, Any]) -> None:
    """Remember what attributes have become since, instead of what they were."""
    now = attributes_of(kept.module)
    for name in before.keys() | now.keys():
        if name not in now:
            kept.attributes.pop(name, None)
        elif name not in before or before[name] is not now[name]:
            kept.attributes[name] = now[name]


def _written(where: tuple[Any, ...]) -> str:
    """The name as Python writes it: model.reader, model.stages[0]."""
    names = (f".{name}" if isinstance(name, str) and name else f"[{name!r}]" for name in where)
    return "model" + "".join(names)
