"""Purity of forwards: what a module's forward changes that a second forward would change again.

Checkpointing runs forwards twice and puts back what :class:`~vram_guard.state.forwards.FirstForward` keeps. The rest is
found here, in a trace of the step as written. Only the second optimizer step is looked at: a mask or a table that is
made at the first call is there by then, and what is set to the value that it has already is not changed.
"""

# ruff: noqa: SLF001 - parameters, buffers and hooks as the module keeps them; a storage's and a generator's number

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from vram_guard.state.forwards import counts_as_written
from vram_guard.state.reached import parts_of
from vram_guard.techniques.patched_forward import PatchedForward, has_forward, inside
from vram_guard.tensors import storage_of, tensors_in, version_of
from vram_guard.timeline import ChangeKind, StateChange

if TYPE_CHECKING:
    from typing_extensions import Self

#: Objects are followed so far from a module's attributes: ``module.helper.table`` is two steps away.
DEPTH = 2

#: Objects that are looked at for one forward; a module that holds more is looked at in part.
MOST = 4096

#: Bytes of a NumPy array that are compared; larger ones are left to whoever runs the step for real.
LARGEST_ARRAY = 2**20

#: Values that are compared by what they are; all others are compared by identity.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_INTERNAL = vars(nn.Module()).keys()
_OURS = "vram_guard"


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

    def __deepcopy__(self, _memo: object) -> Self:
        """A copy of a watched model, such as an average of its weights, is watched by the same."""
        return self

    def install(self, model: nn.Module, names: Iterable[str]) -> None:
        """Watch the forwards of these modules ("" is the model itself) from now on; other names mean nothing."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name in modules and has_forward(modules[name]):
                WatchedForward(inside(modules[name]), name, self).install()

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

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results. Only a forward that checkpointing would run again is looked at."""
        if not (self.module.training and torch.is_grad_enabled()):
            return self.as_written(*args, **kwargs)
        operations = self._watch.operations
        before = _Look(self.module, (*args, *kwargs.values())) if operations.measured else None
        with operations.noted() as noted:
            out = self.as_written(*args, **kwargs)
        if before is not None:
            for kind, name in before.changed(noted):
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
        self._contents: dict[str, tuple[int, Any]] = {}
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
        for name, value, content in _reached(module):
            if isinstance(value, torch.Tensor):
                self._tensors.setdefault(storage_of(value), ("tensor", name))
                continue
            if isinstance(value, torch.Generator):
                self._generators[number_of(value)] = name
            self._contents[name] = id(value), _tokens(content)
        for tensor in tensors_in(inputs):
            self._tensors.setdefault(storage_of(tensor), ("input", ""))

    def changed(self, noted: Noted) -> Iterator[tuple[ChangeKind, str]]:
        """Kinds and names of what a forward has changed since, and checkpointing does not put back."""
        put_back = {buffer[0] for buffer in self._buffers if counts_as_written(*buffer[1:])}
        for at, made_before in noted.written.items():
            # A number that was a tensor's of ours is another's where that one has died since.
            is_old = made_before or (made_before is None and at in self._tensors)
            if is_old and at not in put_back:
                yield self._tensors.get(at, ("elsewhere", ""))
        known = {key for key, used_before in noted.generators.items() if used_before or key in self._generators}
        drawn = {self._generators.get(key, "") for key in known}
        now = _owned(self._module)
        yield from (("object", name) for name, ids in self._owned.items() if now.get(name, ids) != ids)
        for name, value, content in _reached(self._module):
            before = self._contents.get(name)
            if before is not None and before[0] == id(value) and before[1] != _tokens(content):
                if _is_generator(value):
                    drawn.add(name)
                else:
                    yield "object", name
        yield from (("generator", name) for name in sorted(drawn))


# --- what a module refers to -----------------------------------------------------------------------------------------


def _reached(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Tensors, and objects with their content, that a module's attributes, classes and hooks lead to, with names."""
    pending: deque[tuple[str, Any, int]] = deque()
    classes: dict[type, None] = {}
    for prefix, owner in _inside(module):
        pending += [
            (prefix + name, value, 0)
            for name, value in vars(owner).items()
            if name not in _INTERNAL and type(value) not in _PLAIN
        ]
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
            pending += [(prefix + _name_of(hook), hook, 0) for hook in hooks.values()]
        classes.update(dict.fromkeys(kind for kind in type(owner).__mro__ if _is_users(kind)))
    pending += [(kind.__qualname__, kind, 0) for kind in classes]
    seen: set[int] = set()
    while pending and len(seen) < MOST:
        name, value, depth = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield name, value, None
            continue
        content = _content(value, depth)
        if content is None:
            continue
        yield name, value, content
        if depth < DEPTH and not isinstance(content, bytes):
            inside = content.items() if isinstance(content, Mapping) else enumerate(content)
            pending += [(f"{name}.{key}", part, depth + 1) for key, part in inside if type(part) not in _PLAIN]


def _inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{path}." if path else "", owner) for path, owner in module.named_modules())


def _owned(module: nn.Module) -> dict[str, list[int]]:
    """Which parameters and modules there are, by ``id``."""
    kinds = ("_parameters", "_modules")
    return {
        prefix + kind: list(map(id, vars(owner)[kind].values())) for prefix, owner in _inside(module) for kind in kinds
    }


def _content(value: Any, depth: int) -> Any:
    """What an object holds that may change while it stays the same; None where that is nothing, or not looked at."""
    if isinstance(value, _CONTAINERS):
        return value
    if _is_generator(value):
        return _state_of(value)
    if isinstance(value, type):
        # Of classes only the modules' own: others are not theirs to change.
        own = {name: part for name, part in vars(value).items() if not callable(part) and not name.startswith("__")}
        return own if depth == 0 else None
    if isinstance(value, (nn.Module, ModuleType)) or _defined_in(value).startswith(_OURS):
        return None
    if type(value).__name__ == "ndarray" and type(value).__module__ == "numpy":
        return value.tobytes() if value.nbytes <= LARGEST_ARRAY else None
    return parts_of(value)


def _tokens(content: Any) -> Any:
    """The content as values that can be compared later, and hold nothing."""
    if isinstance(content, Mapping):
        return [(_token(key), _token(value)) for key, value in content.items()]
    return content if isinstance(content, bytes) else [_token(value) for value in content]


def _token(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return tuple(map(_token, value)) if isinstance(value, tuple) else id(value)


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _state_of(generator: Any) -> bytes:
    import pickle

    if isinstance(generator, torch.Generator):
        state: bytes = generator.get_state().numpy().tobytes()
        return state
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def number_of(generator: torch.Generator) -> int:
    """A number of torch's generator behind this object, of which there may be several for one generator."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "torch", "abc", "typing")


def _defined_in(value: Any) -> str:
    return str((value if isinstance(value, FunctionType) else type(value)).__module__)


def _name_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
