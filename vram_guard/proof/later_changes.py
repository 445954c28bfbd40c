"""What a step reads that other code changes between steps: one look at a step does not tell what it will do then."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.user_code import is_users_file

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

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


class CodeRun:
    """Takes down which of the user's functions run inside the block, and the iterators that they keep."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._seen: dict[int, CodeType] = {}
        """Every function's code, by its identity: most calls are of libraries, and a hash of code reads all of it."""
        self._iterators: dict[str, None] = {}

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_exception: object) -> None:
        sys.setprofile(self._before)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self._seen:
            return
        self._seen[id(code)] = code
        if code in self._codes or not is_users_file(code.co_filename):
            return
        self._codes.add(code)
        cells, names = frame.f_locals, frame.f_globals
        kept = {**{name: cells.get(name) for name in code.co_freevars}, **{n: names.get(n) for n in code.co_names}}
        self._iterators.update(dict.fromkeys(name for name, value in kept.items() if _goes_on(value)))

    def takes_gradients(self) -> Iterator[str]:
        """Sentences about functions that put themselves between operators and the backward pass."""
        for code in self._codes:
            for name in sorted(_OF_GRADIENTS & set(_names(code))):
                yield _("{function} uses {name}, by which a backward pass may join samples",
                        function=code.co_name, name=name)  # fmt: skip

    def changed_later(self, model: nn.Module, others: Iterable[object] = ()) -> Iterator[str]:
        """Sentences about what the functions read and other code changes.

        Args:
            model: that is trained.
            others: objects with functions that run between steps.
        """
        read = {name for code in self._codes for name in _attributes(code, "LOAD")}
        kinds = {kind for one in (*model.modules(), *others) for kind in type(one).__mro__}
        functions = [function for kind in kinds for function in _functions(kind)]
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


def _goes_on(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and hasattr(kind, "__iter__")


def _functions(kind: type) -> Iterator[FunctionType]:
    for method in vars(kind).values():
        method = getattr(method, "__func__", getattr(method, "fget", method))  # noqa: PLW2901 - out of its descriptor
        method = getattr(method, "__wrapped__", method)  # noqa: PLW2901 - as no_grad wraps it
        if isinstance(method, FunctionType) and is_users_file(method.__code__.co_filename):
            yield method


def _between_steps(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """Those that are not called before the first step alone."""
    functions = list(functions)
    before, waiting = set(_BEFORE), list(_BEFORE)
    while waiting:
        name = waiting.pop()
        called = {used for one in functions if one.__name__ == name for used in _attributes(one.__code__, "LOAD")}
        waiting += called - before
        before |= called
    return [one for one in functions if one.__name__ not in before]


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _attributes(code: CodeType, how: str) -> set[str]:
    """Names of attributes that a function loads or stores; of what ``setattr`` is given, those that are written out."""
    operations = {"LOAD": ("LOAD_ATTR", "LOAD_METHOD"), "STORE": ("STORE_ATTR", "DELETE_ATTR")}[how]
    found = {one.argval for one in dis.get_instructions(code) if one.opname in operations}
    if how == "STORE" and "setattr" in code.co_names:
        found |= {one for one in code.co_consts if isinstance(one, str)}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _attributes(inner, how)
    return found
