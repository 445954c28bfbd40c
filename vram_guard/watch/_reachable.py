"""State that can be reached from a module through containers and the user's own objects, and how it is put back.

Followed are lists, dicts, sets, deques and tuples, modules that are kept out of the model, and objects with attributes
whose class is the user's own, or comes from the package of one of the model's classes: to a depth of :data:`DEPTH`,
:data:`PARTS` of them in all, containers of up to :data:`ITEMS`. What a framework keeps there (a trainer, optimizers,
configs) is left alone. All else cannot be put back: generators and other iterators, open files, objects of other
packages or written in C. :attr:`Reached.beyond` names it, so that it can be said before training.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import logging
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from vram_guard.language import _
from vram_guard.state.containers import MUTABLE, look
from vram_guard.state.modules import ModuleState
from vram_guard.user_code import is_users_module

#: Containers within containers, and objects within them, so many deep.
DEPTH = 8
#: Containers and objects in all: a look at one takes about a microsecond.
PARTS = 5_000
#: Items of one container; of a longer list the length alone is put back.
ITEMS = 10_000
#: Bytes of a NumPy array that is copied for every batch.
ARRAY_BYTES = 2**20

#: Exact types of values that hold nothing that could change.
FLAT = frozenset({
    int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
})  # fmt: skip
_UNCHANGING = (
    *(*(int, float, complex, str, bytes, type), enum.Enum, PurePath, functools.partial, weakref.ref),
    *(logging.Logger, type(threading.Lock()), type(threading.RLock())),
)
#: Modules of the standard library whose objects do not change.
_VALUES = frozenset({"datetime", "decimal", "fractions", "re", "uuid", "operator", "typing", "inspect", "zoneinfo"})
#: Classes of the standard library that only hold attributes.
_PLAIN = (types.SimpleNamespace, collections.UserDict, collections.UserList)
_TORCH = ("torch", "torchvision", "torchaudio", "torchmetrics")
#: What every module has: looking into a dozen hook tables a module would take long.
_EVERY_MODULES = frozenset(vars(nn.Module()))

Where = tuple[Any, ...]
"""Names, keys and indices from the model to a value."""


class Slots:
    """The attributes of an object whose class has ``__slots__``; as :class:`ModuleState` for those that have none."""

    def __init__(self, owner: Any) -> None:
        self.module = owner
        self.attributes = attributes_of(owner)

    def restore(self) -> None:
        """Put everything back."""
        for name in _slots(type(self.module)):
            if name in self.attributes:
                object.__setattr__(self.module, name, self.attributes[name])
            elif hasattr(self.module, name):
                object.__delattr__(self.module, name)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object by name, as they are now."""
    if hasattr(owner, "__dict__"):
        return dict(vars(owner))
    return {name: getattr(owner, name) for name in _slots(type(owner)) if hasattr(owner, name)}


class Reached:
    """Everything mutable that was found from one place after another.

    Args:
        model: whose modules are looked at by :meth:`module`.
        frameworks: top-level packages whose objects are left alone.

    Attributes:
        holders: modules and objects, with their attributes.
        contents: mutable containers, each with a copy of what it holds (of a long list: its length).
        tensors: by id; parameters are not among them.
        parameters: of the model, and of modules that are kept out of it.
        generators: of torch.
        others: functions that put other state back.
        beyond: what cannot be put back: where it is -> what it is, in words.
    """

    def __init__(self, model: nn.Module, frameworks: Iterable[str] = ()) -> None:
        self._frameworks = frozenset((*_TORCH, "vram_guard", *frameworks))
        modules = list(model.modules())
        self._own = {_root(kind) for kind in set(map(type, modules))} - self._frameworks
        self._seen = set(map(id, modules))
        self._parts = 0
        self.holders: list[ModuleState | Slots] = []
        self.contents: list[tuple[Any, Any]] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.parameters: list[nn.Parameter] = []
        self.generators: list[torch.Generator] = []
        self.others: list[Callable[[], Any]] = []
        self.beyond: dict[Where, str] = {}

    def module(self, module: nn.Module, where: Where = ()) -> None:
        """Remember a module, and follow its attributes."""
        kept = ModuleState(module, [])
        self.holders.append(kept)
        buffers = kept.attributes["_buffers"]
        self.contents.append((buffers, buffers.copy()))
        for tensor in buffers.values():
            if tensor is not None:
                self.tensors[id(tensor)] = tensor
        for parameter in kept.attributes["_parameters"].values():
            if parameter is not None:
                self.parameters.append(parameter)
        for name in kept.attributes.keys() - _EVERY_MODULES:
            value = kept.attributes[name]
            if type(value) not in FLAT and id(value) not in self._seen:
                self._follow(value, (*where, name))

    def _follow(self, value: Any, where: Where) -> None:
        pending = [(value, where)]
        while pending:
            part, at = pending.pop()
            if isinstance(part, torch.Tensor):
                if not isinstance(part, nn.Parameter):
                    self.tensors[id(part)] = part
                continue
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            self._parts += 1
            if self._parts > PARTS:
                self.beyond[at] = _("a {kind}, and what follows it", kind=type(part).__name__)
                return
            for name, child in self._children(part, at):
                if type(child) in FLAT:
                    continue
                if len(at) - len(where) >= DEPTH:
                    self.beyond[at] = _("what lies deeper")
                    break
                pending.append((child, (*at, name)))

    def _children(self, part: Any, at: Where) -> Iterable[tuple[Any, Any]]:
        """The parts of a value by their names, once it has been remembered itself."""
        kind = type(part)
        if isinstance(part, (*MUTABLE, tuple)):
            return () if _root(kind) in self._frameworks else self._container(part, at)
        if isinstance(part, nn.Module):  # kept out of the model: a teacher in a list
            for name, module in part.named_modules():
                self._seen.add(id(module))
                self.module(module, (*at, name) if name else at)
        elif isinstance(part, torch.Generator):
            self.generators.append(part)
        elif not (isinstance(part, _UNCHANGING) or self._by_state(part, at) or _root(kind) in self._frameworks):
            return self._object(part, at)
        return ()

    def _container(self, part: Any, at: Where) -> Iterable[tuple[Any, Any]]:
        fixed = isinstance(part, tuple)
        if len(part) > ITEMS:
            if isinstance(part, list):
                self.contents.append((part, len(part)))
            self.beyond[at] = _("a {kind} of {count} items", kind=type(part).__name__, count=len(part))
            return ()
        if not fixed:
            self.contents.append((part, look(part)))
        if set(map(type, part.values() if isinstance(part, dict) else part)) <= FLAT:
            return ()
        return part.items() if isinstance(part, dict) else enumerate(part)

    def _by_state(self, part: Any, at: Where) -> bool:
        """Random number generators and arrays; True where it was one."""
        if isinstance(part, random.Random):
            self.others.append(functools.partial(part.setstate, part.getstate()))
            return True
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return False
        if isinstance(part, numpy.random.Generator):
            self.others.append(functools.partial(setattr, part.bit_generator, "state", part.bit_generator.state))
        elif isinstance(part, numpy.random.RandomState):
            self.others.append(functools.partial(part.set_state, part.get_state()))
        elif isinstance(part, numpy.ndarray):
            if part.nbytes > ARRAY_BYTES or part.dtype.hasobject:
                self.beyond[at] = _("a NumPy array of {count} values", count=part.size)
            elif part.flags.writeable:
                self.others.append(functools.partial(numpy.copyto, part, part.copy()))
        else:
            return isinstance(part, (numpy.generic, numpy.dtype))
        return True

    def _object(self, part: Any, at: Where) -> Iterable[tuple[Any, Any]]:
        kind = type(part)
        followed = isinstance(part, _PLAIN) or _root(kind) in self._own or _is_users(kind.__module__)
        if followed and not isinstance(part, io.IOBase):
            kept = ModuleState(part, []) if hasattr(part, "__dict__") else Slots(part)
            self.holders.append(kept)
            return kept.attributes.items()
        if _root(kind) not in _VALUES:
            self.beyond[at] = _("a {kind}", kind=kind.__name__)
        return ()


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_is_users = functools.lru_cache(maxsize=1024)(is_users_module)


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class and of its bases, under the names that instances have them by."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
