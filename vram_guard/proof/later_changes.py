"""What a step reads that other code changes between steps: one look at a step does not tell what it will do then."""

from __future__ import annotations

import contextlib
import dis
import inspect
import linecache
import sys
from collections.abc import Container, Hashable, Iterable, Iterator
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.state.writes import NOT_READ, Writes
from vram_guard.user_code import is_users_file

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.state.collector import ObjectsBefore

#: Methods that have run before the first step.
_BEFORE = frozenset(
    (
        *("__init__", "__post_init__", "__new__", "__init_subclass__", "__setstate__", "setup", "prepare_data"),
        *("configure_model", "configure_sharded_model", "configure_optimizers", "configure_callbacks", "on_fit_start"),
        *("on_train_start", "on_sanity_check_start", "on_sanity_check_end", "train_dataloader", "val_dataloader"),
        *("init_weights", "before_run", "before_train"),
    )
)


#: What functions are given to that run inside a backward pass.
_OF_GRADIENTS = frozenset(
    ("grad_fn", "register_hook", "register_prehook", "register_multi_grad_hook", "saved_tensors_hooks")
)


class CodeRun(Writes):
    """Takes down which of the user's functions run inside the block, the iterators that they keep, what they write to.

    Args:
        before: see :class:`~vram_guard.state.writes.Writes`.
    """

    def __init__(self, before: ObjectsBefore | None = None) -> None:
        super().__init__(before)
        self._codes: set[CodeType] = set()
        self._iterators: dict[str, None] = {}

    def begins(self, frame: FrameType) -> None:
        """Remember a function, and the iterators that it keeps."""
        code = frame.f_code
        if code in self._codes:
            return
        self._codes.add(code)
        cells, names = frame.f_locals, frame.f_globals
        kept = {**{name: cells.get(name) for name in code.co_freevars}, **{n: names.get(n) for n in code.co_names}}
        self._iterators.update(dict.fromkeys(name for name, value in kept.items() if _goes_on(value)))

    def writes_elsewhere(self, known: Container[Hashable]) -> Iterator[str]:
        """Sentences about functions that write to what is not compared; see ``Writes.elsewhere``."""
        for function, text in self.elsewhere(known):
            if text == NOT_READ:
                yield _("what {function} writes to is not known: its source cannot be read", function=function)
                continue
            yield _("{function} writes to {text}, which is not part of the model", function=function, text=text)

    def takes_gradients(self) -> Iterator[str]:
        """Sentences about functions that put themselves between operators and the backward pass."""
        for code in self._codes:
            for name in sorted(_OF_GRADIENTS & set(_names(code))):
                yield _("{function} uses {name}, by which a backward pass may join samples",
                        function=code.co_name, name=name)  # fmt: skip

    def changed_later(self, model: nn.Module, others: Iterable[FunctionType] = ()) -> Iterator[str]:
        """Sentences about what the functions read and other code changes.

        Args:
            model: that is trained.
            others: functions that run between steps, beside those of the model.
        """
        read = {name for code in self._codes for name in _attributes(code, "LOAD")}
        functions = list(dict.fromkeys([*functions_of(model.modules()), *others]))
        iterators = dict(self._iterators)
        for part in model.modules():
            iterators.update((name, None) for name in read & vars(part).keys() if _goes_on(vars(part)[name]))
        for function in functions:
            if function.__code__ in self._codes and any(map(_goes_on, function.__defaults__ or ())):
                iterators[function.__name__] = None
        for name in iterators:
            yield _("the step takes values from {name}, which gives others in each step", name=name)
        for function in _between_steps(functions):
            if function.__code__ in self._codes:
                continue
            for name in sorted(_attributes(function.__code__, "STORE") & read):
                yield _("the step reads {name}, which {function} changes", name=name, function=function.__qualname__)


def functions_of(objects: Iterable[object]) -> list[FunctionType]:
    """The methods of the user's in the classes of objects."""
    return [function for kind in {kind for one in objects for kind in type(one).__mro__} for function in _methods(kind)]


def functions_around() -> list[FunctionType]:
    """Functions of the user's that are running, and those of the imported modules that they may call."""
    known, found, over = _imported_functions(), list[FunctionType](), dict[str, None]()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - what calls is what runs between steps
    while frame is not None and (caller := frame.f_back) is not None:
        if is_users_file(caller.f_code.co_filename):
            rest, called = _still_to_run(caller, frame.f_code)
            found.append(rest)
            over.update(dict.fromkeys(called))
        frame = caller
    looked = list(over)
    for name in looked:  # those that are added in the loop too
        for function in known.get(name, ()):
            rest, called = _once_called(function)
            found.append(rest)
            looked += [one for one in called if one not in over]
            over.update(dict.fromkeys(called))
    for function in found:  # as above; what is named once more runs once more
        for name in _attributes(function.__code__, "NAME"):
            found += known.pop(name, [])
    return found


def read_code_around() -> None:
    """Read here, and once, what copies of this process would each read of the functions around them."""
    for function in _between_steps(functions_around()):
        _attributes(function.__code__, "STORE")


def _imported_functions() -> dict[str, list[FunctionType]]:
    """Those of the user's modules, and of their classes, by the name that they are called by."""
    known: dict[str, list[FunctionType]] = {}
    modules = {name: module for name, module in list(sys.modules.items()) if _is_users(module)}
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if type(value) is FunctionType and is_users_file(value.__code__.co_filename):
                known.setdefault(value.__name__, []).append(value)
            kinds = (value if issubclass(type(value), type) else type(value)).__mro__
            for function in [one for kind in kinds if kind.__module__ in modules for one in _methods(kind)]:
                # What is called by no name of its own (``__call__``) belongs to who names the class, or an object.
                called = name if function.__name__.startswith("__") else function.__name__
                known.setdefault(called, []).append(function)
    return known


def _still_to_run(frame: FrameType, called: CodeType) -> tuple[FunctionType, list[str]]:
    """A running function without what it has set before all loops that it is in, and without the calls before them.

    Args:
        frame: of the function.
        called: what runs in its call: left out too, as it is looked at by itself, unless a loop calls it again.

    Returns:
        The function, and the names that it has called before those loops.
    """
    code, first = frame.f_code, frame.f_lasti
    instructions = list(dis.get_instructions(code))
    back = [one for one in instructions if one.opcode in _JUMPS and one.argval < one.offset]
    while around := [one.argval for one in back if one.argval < first <= one.offset]:
        first = min(around)
    done = [one.offset for one in instructions if one.opname in _OPERATIONS["STORE"] and one.offset < first]
    is_once, named = first == frame.f_lasti, _OPERATIONS["NAME"]
    if is_once:
        loads = (one.offset for one in instructions if one.opname in named and one.argval == called.co_name)
        done += [at for at in loads if at < first][-1:]
    calls = [(at, name) for at, name in _calls(instructions) if at < first and at not in done]
    done += [at for at, _name in calls]
    # What a script defines by a name is among the functions of its module.
    left_out = {called} if is_once else set[CodeType]()
    if code.co_name == "<module>":
        left_out |= {one for one in _codes_in(code) if not one.co_name.startswith("<")}
    return _without(code, done, left_out), [name for _at, name in calls]


def _once_called(function: FunctionType) -> tuple[FunctionType, list[str]]:
    """A function that has run, without what it has set and called; what it has defined or named may run later.

    Returns:
        That, and the names that it has called. A generator, a method of the same name, and what has a decorator, which
        may have kept it, stay as they are.
    """
    code = function.__code__
    is_decorated = linecache.getline(code.co_filename, code.co_firstlineno).lstrip().startswith("@")
    if code.co_flags & _GOES_ON_LATER or "." in function.__qualname__ or is_decorated:
        return function, []
    instructions = list(dis.get_instructions(code))
    calls = list(_calls(instructions))
    done = [one.offset for one in instructions if one.opname in _OPERATIONS["STORE"]]
    return _without(code, [*done, *(at for at, _name in calls)], set()), [name for _at, name in calls]


def _calls(instructions: list[dis.Instruction]) -> Iterator[tuple[int, str]]:
    """Where a name is loaded just to be called, as Python says from 3.11 on; for earlier ones no call is known."""
    empty = {at for at, one in enumerate(instructions) if one.opname == "PUSH_NULL"}
    beside = -1 if sys.version_info < (3, 13) else 1
    for at, one in enumerate(instructions):
        by_name = one.opname == "LOAD_NAME" and at + beside in empty
        if by_name or (one.opname == "LOAD_GLOBAL" and "NULL" in one.argrepr.split(" + ")):
            yield one.offset, one.argval


def _without(code: CodeType, done: list[int], left_out: set[CodeType]) -> FunctionType:
    """A function of the code without the instructions at these offsets, and without some that it defines."""
    still = bytearray(code.co_code)
    for at in done:
        still[at : at + 2] = dis.opmap["NOP"], 0
    own = (None if isinstance(one, CodeType) and one in left_out else one for one in code.co_consts)
    cells = tuple(CellType() for _name in code.co_freevars)
    return FunctionType(code.replace(co_consts=tuple(own), co_code=bytes(still)), {}, closure=cells)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (one for one in code.co_consts if isinstance(one, CodeType))


def _is_users(module: Any) -> bool:
    # What a module makes when it is asked for, as lazy ones do, is no file of its own.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else _attribute(module, "__file__")
    return isinstance(file, str) and is_users_file(file)


def _goes_on(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and hasattr(kind, "__iter__")


def _methods(kind: type) -> Iterator[FunctionType]:
    for given in vars(kind).values():
        of_descriptor = []
        if type(given) is not FunctionType:
            of_descriptor = [_attribute(given, name) for name in ("__func__", "fget", "fset", "fdel")]
        for method in [one for one in of_descriptor if one is not None] or [given]:
            function = _attribute(method, "__wrapped__") or method  # as no_grad wraps it
            if type(function) is FunctionType and is_users_file(function.__code__.co_filename):
                yield function


def _attribute(value: Any, name: str) -> Any:
    """None where there is none, or asking for it runs code that fails."""
    with contextlib.suppress(Exception):
        return getattr(value, name, None)
    return None


def _between_steps(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """Those that are not called before the first step alone, as far as names tell: one that others call too is not."""
    functions = list(functions)
    before, waiting = set(_BEFORE), list(_BEFORE)
    while waiting:
        name = waiting.pop()
        called = {used for one in functions if one.__name__ == name for used in _attributes(one.__code__, "LOAD")}
        waiting += called - before
        before |= called
    between = [one for one in functions if one.__name__ not in before]
    again = {name for one in between for name in _attributes(one.__code__, "NAME")} - _BEFORE
    return between + [one for one in functions if one.__name__ in before & again]


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


#: Flags of functions whose call is not over when it returns.
_GOES_ON_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_OPERATIONS = {
    "LOAD": ("LOAD_ATTR", "LOAD_METHOD"),
    "STORE": ("STORE_ATTR", "DELETE_ATTR"),
    "NAME": ("LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "LOAD_GLOBAL", "STORE_ATTR"),
}


@cache
def _attributes(code: CodeType, how: str) -> frozenset[str]:
    """Names of attributes that a function loads or stores, or all that it loads; of ``setattr``, those written out."""
    operations = _OPERATIONS[how]
    found = {one.argval for one in dis.get_instructions(code) if one.opname in operations}
    if how == "STORE" and "setattr" in code.co_names:
        found |= {one for one in code.co_consts if isinstance(one, str)}
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and (how != "STORE" or inner.co_name not in _BEFORE):
            found |= _attributes(inner, how)
    return frozenset(found)
