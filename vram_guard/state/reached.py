"""What objects lead to: containers, attributes, closures, generators and arrays; remembered, compared and put back.

One walk serves a batch that is rolled back after it ran out of memory, a trace that leaves the user's objects as they
were, blocks whose forward must not run twice, and steps that move state on themselves. Everything in reach is looked
at, whatever class it has, but what its caller knows to be no state. There is one table of limits, and one rule for what
lies beyond them and for what cannot be looked into (iterators, open files, objects written in C): it is named in
:attr:`ObjectWalk.beyond`, and the caller refuses what depends on it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import itertools
import logging
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from vram_guard.language import _
from vram_guard.limits import ARRAY_REACHED, ITEMS_REACHED, OBJECTS_REACHED
from vram_guard.state.containers import MUTABLE, alike, refill

# --- kinds -----------------------------------------------------------------------------------------------------------

#: Exact types of values that hold nothing that could change.
FLAT = frozenset({
    int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type, object, CodeType,
    types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
})  # fmt: skip
#: Values of these and of derived classes, and what only refers to others or tells people what goes on.
_UNCHANGING = (
    *(int, float, complex, str, bytes, type, ModuleType, enum.Enum, PurePath, weakref.ref, logging.Logger),
    *(type(threading.Lock()), type(threading.RLock()), threading.local, property, staticmethod, classmethod),
    *(types.MappingProxyType, types.GenericAlias, types.UnionType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
)
#: Top-level modules whose objects are values: they are replaced, and not changed.
_VALUES = frozenset({
    *("datetime", "decimal", "fractions", "re", "uuid", "operator", "typing", "inspect", "zoneinfo", "numbers"),
    *("tokenizers", "sentencepiece", "tiktoken", "regex"),
})  # fmt: skip
#: Top-level modules whose objects show or record what goes on, and decide nothing in a training.
RECORDERS = frozenset({
    *("wandb", "tensorboard", "tensorboardX", "mlflow", "neptune", "comet_ml", "clearml", "aim", "swanlab"),
    *("tqdm", "rich", "loguru", "structlog", "logging"),
})  # fmt: skip
#: Packages whose objects hold nothing that a step advances, or what their adapter knows how to advance.
FRAMEWORKS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "mmengine"})
#: Libraries whose objects keep nothing of the user's.
LIBRARIES = frozenset({"torch", "numpy", "vram_guard"})
#: Modules whose classes others derive from, and that keep nothing in them.
_BASES = LIBRARIES | {"builtins", "abc", "typing", "collections", "enum"}
_CONTAINERS = (*MUTABLE, tuple, frozenset)
#: What every module has, hook tables among them: a dozen names for each module that would be looked at in vain.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()


class Variable(NamedTuple):
    """A name that code reads: a closure's cell, or a global of a module."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    place: Any
    """The cell, or the module's globals."""


class Holder(NamedTuple):
    """Something that holds others, and a copy of what it holds."""

    name: str
    value: Any
    content: Any


def key_of(holder: Holder) -> Hashable:
    """What tells holders of a walk apart: the identity; of a variable the name, and the identity of its globals."""
    if not isinstance(holder.value, Variable):
        return id(holder.value)
    place = holder.value.place
    return (id(place), holder.name) if isinstance(place, dict) else holder.name


def in_libraries(value: Any) -> bool:
    """True for objects and functions of libraries that keep nothing of the user's; modules of torch are among them."""
    return home_of(value) in LIBRARIES


def home_of(value: Any) -> str:
    """The top-level module of a function, or of an object's class; this package's adapters count as the package."""
    named = value if isinstance(value, FunctionType) else type(value)
    home = str(getattr(named, "__module__", "")).partition(".")[0]
    return "vram_guard" if home.startswith("vram_guard_") else home


def parts_of(value: Any) -> Mapping[str, Any] | tuple[Any, ...] | None:
    """The objects that a function, a method, a partial or another object holds; None for what holds none."""
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        return {name: held(cell) for name, cell in zip(names, cells, strict=True) if name != "__class__"}
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if not type(value).__dictoffset__:
        names = _slots(type(value))
        return {name: one for name in names if (one := getattr(value, name, _MISSING)) is not _MISSING} or None
    try:
        # Past what a class may do when it is asked for attributes.
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None  # typing.TypeVar of Python 3.12 has an offset, and no dictionary
    return found


def held(cell: CellType) -> Any:
    """The content of a closure's cell; None where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# --- the walk --------------------------------------------------------------------------------------------------------


class ObjectWalk:
    """Everything that holds something and that some objects lead to, each once, the nearest first; to be iterated once.

    Args:
        roots: names and objects.
        left_alone: says True of objects that are not looked at, known to hold nothing that matters.
        globals_too: whether the globals that functions name are looked at, those of methods of objects included.

    Attributes:
        tensors: that were found, by ``id``, with a name of each.
        beyond: what was not looked into: its name -> its kind, in words.

    Example:
        >>> walk = ObjectWalk([("model", {"seen": [1], "source": iter([2])})])
        >>> [(found.name, found.content) for found in walk if found.name.endswith("]")]
        [("model['seen']", [1])]
        >>> walk.beyond
        {"model['source']": 'a list_iterator'}
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        left_alone: Callable[[Any], bool] = in_libraries,
        *,
        globals_too: bool = False,
    ) -> None:
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.beyond: dict[str, str] = {}
        self._pending = deque((name, value) for name, value in roots if type(value) not in FLAT)
        self._left_alone = left_alone
        self._globals_too = globals_too
        self._kinds: set[type] = set()
        """Classes whose methods have been looked at."""
        self._asked: dict[int, set[str]] = {}
        """Names that have been looked up, by the identity of a module's globals: its functions share most of them."""

    def __iter__(self) -> Iterator[Holder]:
        seen: set[int] = set()
        most = OBJECTS_REACHED + len(self._pending)
        while self._pending:
            name, value = self._pending.popleft()
            if id(value) in seen:
                continue
            if len(seen) >= most:
                self.beyond[name] = _("a {kind}, and what follows it", kind=type(value).__name__)
                return
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors[id(value)] = name, value
            elif isinstance(value, _CONTAINERS):
                yield from self._container(name, value)
            elif not isinstance(value, _UNCHANGING):
                yield from self._object(name, value)

    def _container(self, name: str, value: Any) -> Iterator[Holder]:
        content = value if isinstance(value, (tuple, frozenset)) else value.copy()
        if content is not value:
            yield Holder(name, value, content)
        parts = content.values() if isinstance(content, dict) else content
        if len(content) <= ITEMS_REACHED:
            named = content.items() if isinstance(content, dict) else enumerate(content)
            self._pending += [(f"{name}[{_key(key)}]", part) for key, part in named if type(part) not in FLAT]
        elif not _are_flat(parts):
            self.beyond[name] = _("a {kind} of {count} items", kind=type(value).__name__, count=len(value))

    def _object(self, name: str, value: Any) -> Iterator[Holder]:
        if isinstance(value, nn.Module) and not self._left_alone(value):
            yield from self._attributes(name, value, dict(vars(value)))
            return
        content = _state_of(value)
        if content is not None:
            yield Holder(name, value, content)
            return
        parts = parts_of(value)
        if isinstance(value, io.IOBase) or (isinstance(value, Iterator) and (parts is None or self._left_alone(value))):
            self.beyond[name] = _("a {kind}", kind=type(value).__name__)
        elif _is_array(value):
            if value.flags.writeable:
                self.beyond[name] = _("a NumPy array of {count} values", count=value.size)
        elif self._left_alone(value) or home_of(value) in _VALUES:
            return
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(parts, tuple):
            self._pending += [(name, part) for part in parts if type(part) not in FLAT]
        elif parts is not None:
            yield from self._attributes(name, value, dict(parts))
        elif "__slots__" not in vars(type(value)):
            self.beyond[name] = _("a {kind}", kind=type(value).__name__)

    def _attributes(self, name: str, value: Any, content: dict[str, Any]) -> Iterator[Holder]:
        if not home_of(value).startswith("vram_guard"):  # an adapter's object writes down what a trace finds
            yield Holder(name, value, content)
        dot = f"{name}." if name else ""
        left_out = OF_EVERY_MODULE if isinstance(value, nn.Module) else ()
        parts = [(key, part) for key, part in content.items() if key not in left_out and type(part) not in FLAT]
        if left_out:
            for key in ("_parameters", "_buffers", "_modules"):
                yield Holder(name, content[key], content[key].copy())
                self._pending += [(dot + own, part) for own, part in content[key].items() if part is not None]
        elif isinstance(value, (Dataset, Sampler)):  # their items are the loader's, which has delivered the batch
            yield from (Holder(dot + key, part, part.copy()) for key, part in parts if isinstance(part, MUTABLE))
            parts = [(key, part) for key, part in parts if not isinstance(part, _CONTAINERS)]
        self._pending += [(dot + str(key), part) for key, part in parts]
        if type(value) not in self._kinds:
            new = [kind for kind in type(value).__mro__ if kind not in self._kinds]
            self._kinds.update(new)
            self._pending += [pair for kind in new for pair in self._of_class(name, kind)]

    def _of_class(self, name: str, kind: type) -> Iterator[tuple[str, Any]]:
        """Containers that a class of the user's holds, and methods, which may keep something in globals."""
        if kind.__module__.partition(".")[0] not in _BASES:
            own = vars(kind).items()
            yield from (
                (f"{kind.__qualname__}.{key}", one) for key, one in own if type(one) in MUTABLE and key[:2] != "__"
            )
            if self._globals_too:
                yield from ((name, one) for one in vars(kind).values() if isinstance(one, FunctionType))

    def _function(self, function: FunctionType) -> Iterator[Holder]:
        for own, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            put = functools.partial(setattr, cell, "cell_contents")
            yield from self._variable(own, Variable(functools.partial(held, cell), put, cell))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if type(value) not in FLAT:
                self._pending.append((function.__name__, value))
        if self._globals_too:
            names = function.__globals__
            asked = self._asked.setdefault(id(names), set())
            new = _names(function.__code__) - asked
            asked |= new
            for own in new:
                get, put = functools.partial(names.get, own, _MISSING), functools.partial(_set_global, names, own)
                yield from self._variable(own, Variable(get, put, names))

    def _variable(self, name: str, variable: Variable) -> Iterator[Holder]:
        value = variable.get()
        yield Holder(name, variable, value)
        if type(value) not in FLAT:
            self._pending.append((name, value))


# --- what is held ----------------------------------------------------------------------------------------------------


def content_of(value: Any) -> Any:
    """What something that a :class:`ObjectWalk` found holds now: a copy, as :attr:`Holder.content` is one."""
    if isinstance(value, Variable):
        return value.get()
    if isinstance(value, MUTABLE):
        return value.copy()
    state = _state_of(value)
    return dict(parts_of(value) or {}) if state is None else state


def same_content(value: Any, one: Any, other: Any) -> bool:
    """True if two contents of it are of the same objects; states of generators and arrays are compared by value."""
    if isinstance(value, Variable):
        return one is other
    if isinstance(one, (dict, list, set, deque)):
        return alike(one, other)
    return bool(comparable(one) == comparable(other))


def comparable(state: Any) -> Any:
    """The state of a generator or an array as bytes and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if hasattr(state, "tobytes"):
        return state.tobytes()
    if isinstance(state, Mapping):  # NumPy's new generators have nested ones
        return [(key, comparable(part)) for key, part in state.items()]
    return tuple(map(comparable, state)) if isinstance(state, tuple) and len(state) < ITEMS_REACHED else state


def put_back(value: Any, content: Any) -> None:
    """Let it hold this content again."""
    if isinstance(value, Variable):
        value.put(content)
    elif isinstance(value, MUTABLE):
        refill(value, content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif is_generator(value):
        _numpys(value)[1](content)
    elif _is_array(value):
        value[...] = content
    elif type(value).__dictoffset__:
        refill(object.__getattribute__(value, "__dict__"), content)
    else:
        _set_slots(value, content)


def is_generator(value: Any) -> bool:
    """True for a random number generator of torch, Python or NumPy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def _state_of(value: Any) -> Any:
    """The state of a generator, or a copy of a small array; None for all others."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if is_generator(value):
        return _numpys(value)[0]()
    if _is_array(value) and value.nbytes <= ARRAY_REACHED and not value.dtype.hasobject and value.flags.writeable:
        return value.copy()
    return None


def _numpys(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Getter and setter of the state of one of NumPy's generators."""
    bits = getattr(generator, "bit_generator", None)
    if bits is None:
        return functools.partial(generator.get_state, legacy=False), generator.set_state
    return lambda: bits.state, functools.partial(setattr, bits, "state")


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _are_flat(parts: Iterable[Any]) -> bool:
    """True if there is nothing to look into: values, and tuples of values."""
    kinds = set(map(type, parts))
    if kinds <= FLAT:
        return True
    return kinds == {tuple} and set(map(type, itertools.chain.from_iterable(parts))) <= FLAT


def _key(key: Any) -> str:
    """A key as it is written; of an object, whose text may be long or run code, the class."""
    return repr(key) if type(key) in FLAT else type(key).__name__


def _set_global(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        names.pop(name, None)
    else:
        names[name] = value


def _set_slots(value: Any, content: Mapping[str, Any]) -> None:
    for name in _slots(type(value)):
        if name in content:
            object.__setattr__(value, name, content[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class and of its bases, under the names that instances have them by."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _names(code: CodeType) -> set[str]:
    """The names of globals (and attributes) that a function uses, those of functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


# --- remembered ------------------------------------------------------------------------------------------------------


class ReachedState:
    """What some objects lead to, as it was when this was made.

    Args:
        roots: names and objects: callables, and others.
        left_alone: see :class:`ObjectWalk`.
        globals_too: see :class:`ObjectWalk`.

    Attributes:
        beyond: see :class:`ObjectWalk`; it is neither compared nor put back.
        tensors: see :class:`ObjectWalk`; what is written to them in place is not noticed.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        left_alone: Callable[[Any], bool] = in_libraries,
        *,
        globals_too: bool = True,
    ) -> None:
        walk = ObjectWalk(roots, left_alone, globals_too=globals_too)
        self.found = list(walk)
        self.beyond, self.tensors = walk.beyond, walk.tensors

    def content(self) -> Iterator[tuple[str, Any]]:
        """Everything that the objects hold now, with its names, but generators and arrays."""
        for name, value, _content in self.found:
            if not has_state(value):
                now = content_of(value)
                yield from ((name, now),) if _is_one(value) else _named(name, now)

    def kept(self) -> Iterator[tuple[str, Any]]:
        """The names that hold something else than they did, with what they hold."""
        for name, value, content in self.found:
            now = content_of(value)
            if same_content(value, content, now):
                continue
            if is_generator(value):
                yield _("the generator {name}", name=name), value
            elif has_state(value):
                yield name, value
            elif _is_one(value):
                yield name, now
            else:
                changed = (
                    key for key in {**content, **now} if content.get(key, _MISSING) is not now.get(key, _MISSING)
                )
                yield from _named(name, {key: now.get(key) for key in changed})

    def restore(self, where: Callable[[Any], bool] = lambda _now: True) -> None:
        """Put everything back; where only some of it: what holds now what ``where`` says True of."""
        for _name, value, content in self.found:
            now = content_of(value)
            if not same_content(value, content, now) and where(now):
                put_back(value, content)


@contextlib.contextmanager
def reached_kept(
    roots: Iterable[tuple[str, Any]], where: Callable[[Any], bool] = lambda _now: True
) -> Iterator[ReachedState]:
    """Afterwards everything that these objects lead to holds what it held before; see :class:`ReachedState`."""
    state = ReachedState(roots)
    try:
        yield state
    finally:
        state.restore(where)


def _is_one(value: Any) -> bool:
    """True for what is named as a whole: variables and containers; False for attributes."""
    return isinstance(value, (Variable, *MUTABLE))


def has_state(value: Any) -> bool:
    """True for a random number generator, and for an array."""
    return is_generator(value) or _is_array(value)


def _named(name: str, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"{name}.{key}" if name else str(key), value) for key, value in attributes.items())
