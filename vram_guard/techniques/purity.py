"""Purity of forwards: what a module's forward changes that a second forward would change again.

Checkpointing runs forwards twice and puts back what :class:`~vram_guard.state.forwards.FirstForward` keeps. The rest is
found here, in a trace of the step as written. Only the second optimizer step is looked at: a mask or a table that is
made at the first call is there by then, and what is set to the value that it has already is not changed.
"""

# ruff: noqa: SLF001 - parameters, buffers and hooks as the module keeps them; a storage's and a generator's number

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from vram_guard.modes import compiled_with_caller, dispatch_modes, function_modes, packing_hook
from vram_guard.state.collector import ObjectsBefore
from vram_guard.state.forwards import counts_as_written
from vram_guard.state.reached import (
    LIBRARIES,
    OF_EVERY_MODULE,
    ObjectWalk,
    Variable,
    comparable,
    home_of,
    is_generator,
    key_of,
)
from vram_guard.state.writes import NOT_READ, Writes
from vram_guard.techniques.patched_forward import PatchedForward, has_forward, inside
from vram_guard.tensors import storage_of, tensors_in, version_of
from vram_guard.timeline import ChangeKind, StateChange
from vram_guard.user_code import is_users_file

if TYPE_CHECKING:
    from typing_extensions import Self

#: Values that are compared by what they are; all others are compared by identity.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class Noted(NamedTuple):
    """What operators did while a forward ran."""

    written: dict[int, bool | None]
    """Storages that they wrote to -> whether they were made before the forward; None: not known."""
    generators: dict[int, bool]
    """Generators that they drew from (``_cdata``) -> whether others had drawn from them before the forward."""


class Operations(Protocol):
    """The operators of a trace."""

    def noted(self) -> AbstractContextManager[Noted]:
        """Note what they do inside the block."""
        ...

    @property
    def measured(self) -> int:
        """The number of the optimizer step that is running, where it is looked at; else 0."""
        ...

    @property
    def measured_step(self) -> int:
        """The step that counts: the second where there is one, since the first sets things up."""
        ...


class PurityWatch:
    """Watches forwards of a traced model.

    Args:
        operations: of the trace.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self._found: dict[int, dict[StateChange, None]] = {}
        """By the step in which they were seen."""
        self._before: tuple[int, ObjectsBefore] | None = None

    def __deepcopy__(self, _memo: object) -> Self:
        """A copy of a watched model, such as an average of its weights, is watched by the same."""
        return self

    def install(self, model: nn.Module, names: Iterable[str]) -> None:
        """Watch the forwards of these modules ("" is the model itself) from now on; other names mean nothing."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name in modules and has_forward(modules[name]):
                WatchedForward(inside(modules[name]), name, self).install()

    def objects_before(self) -> ObjectsBefore:
        """The objects that were there before the step that is running."""
        if self._before is None or self._before[0] != self.operations.measured:
            self._before = self.operations.measured, ObjectsBefore()
        return self._before[1]

    def add(self, change: StateChange) -> None:
        """Remember a change that was seen."""
        self._found.setdefault(self.operations.measured, {})[change] = None

    def changes(self) -> tuple[StateChange, ...]:
        """Everything that was seen so far in the step that counts, in order, each once."""
        return tuple(self._found.get(self.operations.measured_step, ()))


class WatchedForward(PatchedForward):
    """A module's forward, with a look at the module before and after it."""

    def __init__(self, module: nn.Module, name: str, watch: PurityWatch) -> None:
        super().__init__(module)
        self._name = name
        self._watch = watch
        kinds = {type(part) for part in module.modules()}
        files = [getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds]
        self._is_users = any(is_users_file(file or "<unknown>") for file in files)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results. Only a forward that checkpointing would run again is looked at."""
        if not (self.module.training and torch.is_grad_enabled()):
            return self.as_written(*args, **kwargs)
        operations = self._watch.operations
        before = _Look(self.module, (*args, *kwargs.values())) if operations.measured else None
        writes = Writes(self._watch.objects_before()) if before is not None and self._is_users else None
        around = [] if before is None else [*filter(None, [packing_hook()]), *dispatch_modes(), *function_modes()]
        with operations.noted() as noted, writes or contextlib.nullcontext():
            out = self.as_written(*args, **kwargs)
        found = [] if before is None else list(before.changed(noted, compiled=compiled_with_caller()))
        found += [("around", name) for name in around]
        if before is not None and writes is not None:
            for function, text in writes.elsewhere(before.known):
                found.append(("beyond", f"{function}()") if text == NOT_READ else ("object", text))
        for kind, name in found:
            self._watch.add(StateChange(self._name, kind, name))
        return out


class _Look:
    """A module and what it refers to, as numbers and ids: nothing is kept alive that the forward lets go."""

    def __init__(self, module: nn.Module, inputs: Iterable[Any]) -> None:
        self._module = module
        self._tensors: dict[int, tuple[ChangeKind, str]] = {}
        """Storage -> kind and name of a tensor that lies there."""
        self._buffers: list[tuple[int, nn.Module, str, int, int]] = []
        """Storage, owner, name, id and version of each buffer."""
        self._generators: dict[int, str] = {}
        self._contents: dict[tuple[str, int], Any] = {}
        for prefix, owner in _inside(module):
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    at = storage_of(buffer)
                    self._tensors.setdefault(at, ("buffer", prefix + name))
                    self._buffers.append((at, owner, name, id(buffer), version_of(buffer)))
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    self._tensors.setdefault(storage_of(parameter), ("parameter", prefix + name))
        self._owned = _owned(module)
        walk = ObjectWalk(_roots(module), _is_left_alone)
        self.known: set[Hashable] = set(map(id, module.modules()))
        """Keys of what is compared, as ``Writes.elsewhere`` has them."""
        for holder in walk:
            name, value, content = holder
            self.known.add(key_of(holder))
            if isinstance(value, torch.Generator):
                self._generators[number_of(value)] = name
            self._contents[name, _identity(value)] = _tokens(value, content)
        self._beyond = walk.beyond
        for name, tensor in walk.tensors.values():
            self._tensors.setdefault(storage_of(tensor), ("tensor", name))
        for tensor in tensors_in(inputs):
            self._tensors.setdefault(storage_of(tensor), ("input", ""))

    def changed(self, noted: Noted, *, compiled: bool) -> Iterator[tuple[ChangeKind, str]]:
        """Kinds and names of what a forward has changed since, and checkpointing does not put back.

        Args:
            noted: what its operators have done.
            compiled: whether it is compiled, and its second forward with it: nothing of that is put back.
        """
        put_back = {buffer[0] for buffer in self._buffers if counts_as_written(*buffer[1:]) and not compiled}
        for at, made_before in noted.written.items():
            # A number that was a tensor's of ours is another's where that one has died since.
            is_old = made_before or (made_before is None and at in self._tensors)
            if is_old and at not in put_back:
                yield self._tensors.get(at, ("elsewhere", ""))
        known = {key for key, used_before in noted.generators.items() if used_before or key in self._generators}
        drawn = {self._generators.get(key, "") for key in known}
        now = _owned(self._module)
        yield from (("object", name) for name, ids in self._owned.items() if now.get(name, ids) != ids)
        yield from (("beyond", f"{name} ({kind})") for name, kind in self._beyond.items())
        for name, value, content in ObjectWalk(_roots(self._module), _is_left_alone):
            now = _tokens(value, content)
            if self._contents.get((name, _identity(value)), now) != now:
                if is_generator(value):
                    drawn.add(name)
                else:
                    yield "object", name
        yield from (("generator", name) for name in sorted(drawn))


# --- what a module refers to -----------------------------------------------------------------------------------------


def _roots(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the attributes and hooks of a module and of its parts hold, with names."""
    for prefix, owner in _inside(module):
        own = vars(owner).items()
        yield from ((prefix + name, value) for name, value in own if name not in OF_EVERY_MODULE)
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
            yield from ((prefix + _name_of(hook), hook) for hook in hooks.values())


def _inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{path}." if path else "", owner) for path, owner in module.named_modules())


def _owned(module: nn.Module) -> dict[str, list[int]]:
    """Which parameters and modules there are: their identities."""
    kinds = ("_parameters", "_modules")
    return {
        prefix + kind: list(map(id, vars(owner)[kind].values())) for prefix, owner in _inside(module) for kind in kinds
    }


def _is_left_alone(value: Any) -> bool:
    """True for modules, which are looked at by themselves, and for what is this package's."""
    return isinstance(value, nn.Module) or home_of(value) in LIBRARIES


def _identity(value: Any) -> int:
    return id(value.place if isinstance(value, Variable) else value)


def _tokens(value: Any, content: Any) -> Any:
    """What something holds as values that can be compared later, and hold nothing."""
    if isinstance(value, Variable):
        return _token(content)
    if isinstance(content, Mapping) and not is_generator(value):
        return [(_token(key), _token(part)) for key, part in content.items()]
    return list(map(_token, content)) if isinstance(content, (list, set, deque)) else comparable(content)


def _token(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return tuple(map(_token, value)) if isinstance(value, tuple) else id(value)


def number_of(generator: torch.Generator) -> int:
    """A number of torch's generator behind this object, of which there may be several for one generator."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


def _name_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
