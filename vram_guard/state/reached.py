"""Objects that callables lead to (closures, bound objects, globals), and what the mutable ones hold, put back."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from vram_guard.state.containers import MUTABLE, alike, look, refill

#: Objects that are looked at, besides those that are given: a large model has more attributes of its own.
MOST = 4096

#: A longer list is put back by its length; what is in longer containers is not looked at.
LONGEST = 4096

_MISSING = object()
_CONTAINERS = (*MUTABLE, tuple, frozenset)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
#: Packages whose functions keep nothing of the user's.
_LIBRARIES = ("torch", "numpy", "builtins", "vram_guard")


def parts_of(value: Any) -> Mapping[str, Any] | tuple[Any, ...] | None:
    """The objects that a function, a method, a partial or another object holds; None for what holds none."""
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        return {name: held(cell) for name, cell in zip(names, cells, strict=True) if name != "__class__"}
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if not type(value).__dictoffset__:
        return None
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


class ReachedState:
    """What the objects hold that some callables lead to.

    Args:
        roots: names and objects: callables, and others.
        most: objects that are looked at besides them, the nearest first.
        passed_over: says True of objects that are not looked at either.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        most: int = MOST,
        passed_over: Callable[[Any], bool] = lambda _value: False,
    ) -> None:
        self._cells: list[tuple[str, CellType, Any]] = []
        self._globals: list[tuple[str, dict[str, Any], Any]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._kinds: set[type] = set()
        """Classes whose methods have been looked at."""
        self._asked: dict[int, set[str]] = {}
        """Names that have been looked up, by the identity of a module's globals: its functions share most of them."""
        nobodys: dict[tuple[type, str | None], bool] = {}
        pending = deque(roots)
        most += len(pending)
        seen: set[int] = set()
        while pending and len(seen) < most:
            name, value = pending.popleft()
            if id(value) in seen or value is _MISSING:
                continue
            home = value.__module__ if isinstance(value, FunctionType) else None
            kind = type(value), home
            if kind not in nobodys:
                nobodys[kind] = _is_nobodys(*kind)
            if not nobodys[kind] and not passed_over(value):
                seen.add(id(value))
                pending += self._look_at(name, value)

    def _look_at(self, name: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Remember what an object holds; what it leads to, with names."""
        if isinstance(value, _CONTAINERS):
            if isinstance(value, MUTABLE):
                self._containers.append((name, value, look(value, LONGEST)))
            return () if len(value) > LONGEST else [(name, part) for part in _parts_in(value)]
        if isinstance(value, FunctionType):
            return self._look_at_function(value)
        if isinstance(value, MethodType):
            return (name, value.__self__), (name, value.__func__)
        parts = parts_of(value)
        if isinstance(parts, dict):
            self._attributes.append((name, parts, dict(parts)))
        # A callable object, or one whose methods the others call, may keep something in globals.
        new = [kind for kind in type(value).__mro__ if kind not in self._kinds]
        self._kinds.update(new)
        own = [one for kind in new for one in vars(kind).values() if isinstance(one, FunctionType)]
        if isinstance(parts, Mapping):
            named = [(f"{name}.{key}" if name else str(key), part) for key, part in parts.items()]
        else:
            named = [(name, part) for part in parts or ()]
        return [*((name, one) for one in own), *named]

    def _look_at_function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells.append((name, cell, held(cell)))
            yield name, held(cell)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield function.__name__, value
        names = function.__globals__
        asked = self._asked.setdefault(id(names), set())
        new = _names(function.__code__) - asked
        asked |= new
        for name in new:
            value = names.get(name, _MISSING)
            self._globals.append((name, names, value))
            yield name, value

    def content(self) -> Iterator[tuple[str, Any]]:
        """Everything that the objects hold now, with its names."""
        yield from ((name, held(cell)) for name, cell, _content in self._cells)
        yield from ((name, names.get(name)) for name, names, _value in self._globals)
        for name, attributes, _before in self._attributes:
            yield from ((f"{name}.{key}" if name else key, value) for key, value in attributes.items())
        yield from ((name, look(container, LONGEST)) for name, container, _content in self._containers)

    def kept(self) -> Iterator[tuple[str, Any]]:
        """The names that hold something else than they did, with what they hold."""
        for name, cell, content in self._cells:
            if held(cell) is not content:
                yield name, held(cell)
        for name, names, value in self._globals:
            if names.get(name, _MISSING) is not value:
                yield name, names.get(name)
        for name, attributes, before in self._attributes:
            for key, value in attributes.items():
                if before.get(key, _MISSING) is not value:
                    yield f"{name}.{key}" if name else key, value
        for name, container, content in self._containers:
            now = look(container, LONGEST)
            if not alike(now, content):
                yield name, container[content:] if isinstance(content, int) else now

    def restore(self, where: Callable[[Any], bool] = lambda _now: True) -> None:
        """Put everything back; where only some of it: what holds now what ``where`` says True of."""
        for _name, cell, content in self._cells:
            if held(cell) is not content and where(held(cell)):
                cell.cell_contents = content
        for name, names, value in self._globals:
            if names.get(name, _MISSING) is not value and where(names.get(name)):
                if value is _MISSING:
                    del names[name]
                else:
                    names[name] = value
        for _name, container, content in (*self._containers, *self._attributes):
            now = container[content:] if isinstance(content, int) else container
            if not alike(look(container, LONGEST), content) and where(now):
                refill(container, content)


@contextlib.contextmanager
def reached_kept(
    roots: Iterable[tuple[str, Any]], most: int = MOST, where: Callable[[Any], bool] = lambda _now: True
) -> Iterator[ReachedState]:
    """Afterwards everything that these objects lead to holds what it held before; see :class:`ReachedState`."""
    state = ReachedState(roots, most)
    try:
        yield state
    finally:
        state.restore(where)


def _parts_in(container: Any) -> Iterable[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _is_nobodys(kind: type, function_of: str | None) -> bool:
    """True for what keeps nothing of the user's: values, classes, modules, functions and tensors of libraries.

    Args:
        kind: the object's class.
        function_of: the module of a function.
    """
    if kind in _PLAIN or issubclass(kind, (type, ModuleType, BuiltinFunctionType)):
        return True
    home = str(function_of if issubclass(kind, FunctionType) else getattr(kind, "__module__", ""))
    is_library = home.partition(".")[0] in _LIBRARIES
    return is_library and not issubclass(kind, (*_CONTAINERS, MethodType, functools.partial))


def _names(code: CodeType) -> set[str]:
    """The names of globals (and attributes) that a function uses, those of functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))
