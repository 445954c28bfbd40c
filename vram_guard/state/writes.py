"""What the user's functions write to while they run: attributes, items, globals and containers.

A walk over what a training's objects lead to finds what can be walked. What a function writes to need not be there: a
variable of an imported module, an attribute of a class or a function, what only a weak reference leads to. So the code
is read as well: the source of each function that runs tells where it writes, and its frame tells to which object. Where
that object was made in the same step, nothing remains; where a walk has found it, its content is compared. All others
are named, and so is what cannot be told.
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vram_guard.state.collector import ObjectsBefore
from vram_guard.state.reached import FRAMEWORKS, RECORDERS, home_of
from vram_guard.user_code import is_users_file

if TYPE_CHECKING:
    from typing_extensions import Self


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Methods of containers that change them.
_CHANGING: dict[type, frozenset[str]] = {
    list: _words("append extend insert pop remove clear sort reverse"),
    dict: _words("update pop popitem setdefault clear move_to_end"),
    set: _words("add discard remove pop clear update difference_update intersection_update"),
    deque: _words("append appendleft extend extendleft insert pop popleft remove clear rotate reverse"),
}
#: Functions whose first argument is written to, or goes on.
_OF_FIRST = frozenset(("setattr", "delattr", "next"))
#: What tells how often a function was called, or how numbers are rounded.
_STATEFUL = frozenset(("cache_info", "cache_clear", "getcontext", "setcontext", "localcontext"))
#: Calls that make a new iterator.
_ITERATORS = _words(
    "iter map filter zip enumerate reversed values items keys parameters named_parameters buffers named_buffers "
    "children named_children modules named_modules"
)
#: Attributes of tensors that are set for one backward pass.
_OF_TENSORS = frozenset(("grad", "requires_grad"))
#: Packages whose objects decide nothing in a step, or whose adapter knows what a step advances.
_KNOWN = {*FRAMEWORKS, *RECORDERS, "vram_guard"}
_UNKNOWN = object()
#: In place of a variable that a function has not come to set: nothing was written to it.
_NONE_YET = object()


#: In place of a text: there is no source of the function.
NOT_READ = "?"


class Write(NamedTuple):
    """A place in a function that writes to something."""

    text: str
    """As it is written: ``self.seen[name]``."""
    owner: ast.expr | None
    """What the attribute or the item belongs to; None for a variable of another scope."""
    name: str
    """Of the variable, or of the attribute; "" for an item."""
    is_set_later: bool = False
    """The variable that the owner is reached by is set again in the same line or a later one."""


class Writes:
    """Takes down what the user's functions write to inside the block.

    Args:
        before: the objects whose changes remain; None: nothing is taken down but whether they are needed. The collector
            is paused from when it was made to the end of the block.

    Attributes:
        is_needed: a function writes to something, or calls what may.
    """

    def __init__(self, before: ObjectsBefore | None = None) -> None:
        self.is_needed = False
        self._before = before
        self._found: dict[tuple[str, str], dict[Hashable, Any]] = {}
        """Function and text -> what was there before, by its key, as :meth:`elsewhere` is told those."""
        self._not_told: dict[int, Any] = {}
        """Those of them of which it is not known yet: the collector does not know them."""
        self._young: set[int] = set()
        """Dictionaries that are new to the collector, as one is that held numbers alone before; not kept alive."""
        self._entered: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Frames of libraries' methods -> their object, and what it held."""

    def __enter__(self) -> Self:
        self._outer: Any = sys.getprofile()
        self._of_threads: Any = threading.getprofile()
        self._is_over = False
        threading.setprofile(self._while_inside(self._profile(self._of_threads)))
        sys.setprofile(self._profile(self._outer if callable(self._outer) else None))
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_over = True
        threading.setprofile(self._of_threads)
        if self._outer is None or callable(self._outer):
            sys.setprofile(self._outer)
        else:  # as cProfile's, which is written in C
            getattr(self._outer, "enable", lambda: None)()

    def _while_inside(self, told: Callable[[FrameType, str, Any], None]) -> Callable[[FrameType, str, Any], None]:
        """For threads that begin inside the block: one that goes on after it has the profile that it would have had."""

        def told_until_the_end(frame: FrameType, event: str, argument: Any) -> None:
            if self._is_over:
                sys.setprofile(self._of_threads)
            else:
                told(frame, event, argument)

        return told_until_the_end

    def _profile(self, outer: Any) -> Callable[[FrameType, str, Any], None]:
        """What Python calls at every call and return, most of which are of libraries: they are left at once.

        They are told by the file of their globals. A frame's code, and an identity, are questions that an audit hook
        hears, which takes longer.
        """
        libraries: set[str] = set()
        seen: dict[int, CodeType] = {}
        """Other code, by its identity: a hash of code reads all of it."""
        users: set[int] = set()
        """Identities of the user's."""
        entered = self._entered

        def is_users(frame: FrameType) -> bool:
            file = frame.f_globals.get("__file__")
            if isinstance(file, str) and not is_users_file(file):
                libraries.add(file)
                return False
            code = frame.f_code
            number = id(code)
            if number not in seen:
                seen[number] = code
                if is_users_file(code.co_filename):
                    users.add(number)
                    self.begins(frame)
            return number in users

        def told(frame: FrameType, event: str, argument: Any) -> None:
            if frame.f_globals.get("__file__") in libraries or not is_users(frame):
                if event == "call":
                    caller = frame.f_back
                    if caller is not None and caller.f_globals.get("__file__") not in libraries and is_users(caller):
                        self._enters(frame)
                elif entered and event == "return":
                    self._leaves(frame)
            elif event == "return":
                self._returns(frame)
            elif event == "c_call":
                self._calls_c(frame, argument)
            if outer is not None:
                outer(frame, event, argument)

        return told

    def begins(self, frame: FrameType) -> None:
        """A function of the user's is called for the first time."""

    def _returns(self, frame: FrameType) -> None:
        """A function of the user's is about to return."""
        writes = writes_of(frame.f_code)
        self.is_needed = self.is_needed or bool(writes)
        if self._before is None:
            return
        for one in writes:
            if one.owner is None:
                is_cell = one.name in frame.f_code.co_freevars
                self._add(frame, one.text, _UNKNOWN, one.name if is_cell else (id(frame.f_globals), one.name))
                continue
            owner = _value(one.owner, frame)
            if one.is_set_later and owner is not _NONE_YET:
                owner = _UNKNOWN
            if not (isinstance(owner, torch.Tensor) and (not one.name or one.name in _OF_TENSORS)):
                self._add(frame, one.text, owner)

    def _calls_c(self, frame: FrameType, function: Any) -> None:
        """A function of the user's calls one that is written in C."""
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if name in _STATEFUL:
            self._add(frame, f"{name}()", _UNKNOWN)
        elif any(isinstance(owner, kind) and name in names for kind, names in _CHANGING.items()):
            self._add(frame, f"{type(owner).__name__}.{name}()", owner)

    def _enters(self, frame: FrameType) -> None:
        """A function of the user's has called a library's method."""
        owner = _object_of(frame)
        if owner is not None:
            self.is_needed = True
            if self._before is not None and owner in self._before:
                self._entered[id(frame)] = owner, dict(vars(owner))

    def _leaves(self, frame: FrameType) -> None:
        """A library's method is about to return."""
        owner, held = self._entered.pop(id(frame), (None, {}))
        if owner is None or frame.f_back is None:
            return
        now = vars(owner)
        for name in sorted(name for name in {**held, **now} if held.get(name, held) is not now.get(name, held)):
            text = f"{type(owner).__name__}.{frame.f_code.co_name}() ({name})"
            self._add(frame.f_back, text, owner, (id(owner), name))

    def _add(self, frame: FrameType, text: str, owner: Any, key: Hashable = None) -> None:
        self.is_needed = True
        if self._before is None or owner is _NONE_YET:
            return
        number = id(owner) if key is None else key
        found = self._found.setdefault((frame.f_code.co_name, text), {})
        if number in found:
            return
        if owner is _UNKNOWN:
            found[number] = None
        elif not gc.is_tracked(owner):
            found[number] = self._not_told[id(owner)] = owner
        elif owner in self._before:
            found[number] = owner
        elif type(owner) is dict:
            found[number] = None
            self._young.add(id(owner))

    def elsewhere(self, known: Container[Hashable]) -> Iterator[tuple[str, str]]:
        """Function and text of writes to what was there before and is not among what is compared.

        Args:
            known: identities of objects whose content is compared; of variables the names, with the identity of the
                globals where they are no closure's.
        """
        others = {said: {key for key in owners if key not in known} for said, owners in self._found.items()}
        keys = set[Any]().union(*others.values())
        held = set[int]()
        if self._before is not None:
            asked = [value for key, value in self._not_told.items() if key in keys]
            held = self._before.referred_to([*asked, *self._before.alive(self._young & keys)])
        new = (self._not_told.keys() | self._young) - held
        yield from (said for said, keys in others.items() if keys - new)


def _object_of(frame: FrameType) -> Any:
    """The object whose method runs in a frame of a library; None for modules, values, and what is no method."""
    code = frame.f_code
    owner = frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
    left_alone = isinstance(owner, (torch.nn.Module, torch.Tensor, BaseException)) or home_of(owner) in _KNOWN
    return None if left_alone or not type(owner).__dictoffset__ else owner


@cache
def writes_of(code: CodeType) -> tuple[Write, ...]:
    """Where the source of a function writes to what is none of its own variables.

    Example:
        >>> [one.text for one in writes_of(Writes.__enter__.__code__)]
        ['self._outer', 'self._of_threads', 'self._is_over']
    """
    if code.co_name in ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        return ()  # the function that they are written in is looked at
    if not _nodes(code.co_filename):
        return (Write(NOT_READ, None, NOT_READ),)
    nodes = _nodes(code.co_filename).get(code.co_firstlineno, [])
    return tuple(one for node in nodes if getattr(node, "name", "<lambda>") == code.co_name for one in _writes(node))


@cache
def _nodes(file: str) -> dict[int, list[ast.AST]]:
    """The functions of a file by the line that they begin in."""
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = (
                node.lineno if isinstance(node, ast.Lambda) else min(one.lineno for one in [node, *node.decorator_list])
            )
            found.setdefault(first, []).append(node)
    return found


def _writes(function: ast.AST) -> Iterator[Write]:
    outer: set[str] = set()
    made = _made_in(function)
    bound: dict[str, list[int]] = {}
    """Variables that are set, but by loops, and the lines."""
    loops = {id(name) for node in ast.walk(function) if isinstance(node, ast.For) for name in ast.walk(node.target)}
    waiting = list(ast.iter_child_nodes(function))
    found = list[tuple[int, Write]]()
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        waiting[:0] = ast.iter_child_nodes(node)
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            outer.update(node.names)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id in made):
                found.append((node.lineno, Write(ast.unparse(node), node.value, getattr(node, "attr", ""))))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.setdefault(node.id, []).extend([] if id(node) in loops else [node.lineno])
        elif isinstance(node, ast.Call) and _of_first(node):
            found.append((node.lineno, Write(ast.unparse(node), node.args[0], "")))
    for line, one in found:  # when a function returns, its variables are what was set last
        is_set_later = one.owner is not None and any(at >= line for at in bound.get(_root(one.owner), ()))
        yield one._replace(is_set_later=is_set_later)
    yield from (Write(name, None, name) for name in sorted(outer & bound.keys()))


def _made_in(function: ast.AST) -> set[str]:
    """Variables that are set to containers which are written out there, and to nothing else."""
    own = list(_own_nodes(function))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        return set()  # its variables may have been there before the step
    made = {
        id(target): target.id
        for node in own
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.List, ast.Set))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    others = {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            others.update(node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in made:
            others.add(node.id)
        elif isinstance(node, ast.alias):
            others.add((node.asname or node.name).partition(".")[0])
        else:  # handlers, definitions, patterns
            others.update(one for one in (getattr(node, "name", None), getattr(node, "rest", None)) if one)
    return set(made.values()) - others


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What stands in a function, but in no other that it defines."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            waiting += ast.iter_child_nodes(node)


def _of_first(call: ast.Call) -> bool:
    """True for functions that write to their first argument, but for an iterator that is made in place."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in _OF_FIRST or not call.args:
        return False
    first = call.args[0]
    made_by = first.func if isinstance(first, ast.Call) else None
    is_new = isinstance(first, ast.GeneratorExp) or getattr(made_by, "attr", getattr(made_by, "id", "")) in _ITERATORS
    return name != "next" or not is_new


def _root(value: ast.expr) -> str:
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """What names, attributes and items lead to in a frame, without running code of the user's."""
    if isinstance(expression, ast.Name):
        code = frame.f_code
        if expression.id in (*code.co_varnames, *code.co_cellvars) and expression.id not in frame.f_locals:
            return _NONE_YET
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id, _UNKNOWN))
    if isinstance(expression, ast.Attribute) and not expression.attr.startswith("__"):
        owner = _value(expression.value, frame)
        if owner is _NONE_YET or owner is _UNKNOWN:
            return owner
        if isinstance(getattr(type(owner), expression.attr, None), property):
            return _UNKNOWN  # it is the user's code
        return getattr(owner, expression.attr, _UNKNOWN)
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, (ast.Constant, ast.Name)):
        owner, key = _value(expression.value, frame), _key(expression.slice, frame)
        if owner is _NONE_YET:
            return owner
        if type(owner) in (list, tuple, dict) and type(key) in (int, str):
            try:
                return owner[key]
            except (LookupError, TypeError):
                return _UNKNOWN
    return _UNKNOWN


def _key(expression: ast.expr, frame: FrameType) -> Any:
    return expression.value if isinstance(expression, ast.Constant) else _value(expression, frame)
