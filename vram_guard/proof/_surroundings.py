"""Variables outside of a model that its code uses: of enclosing functions, and of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from vram_guard.limits import CALLS_FOLLOWED
from vram_guard.user_code import is_installed_file


def used_by_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Name and value of each variable that the methods of a class use; nothing for classes of installed packages."""
    seen: set[FunctionType] = set()
    for method in vars(kind).values():
        method = getattr(method, "__func__", getattr(method, "fget", method))  # noqa: PLW2901 - out of its descriptor
        if isinstance(method, FunctionType):
            yield from _used(method, seen, CALLS_FOLLOWED)


def _used(function: FunctionType, seen: set[FunctionType], deeper: int) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    if function in seen or is_installed_file(code.co_filename):
        return
    seen.add(function)
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    found.update((name, function.__globals__[name]) for name in _names(code) if name in function.__globals__)
    for name, value in found.items():
        if isinstance(value, FunctionType):
            if deeper:
                yield from _used(value, seen, deeper - 1)
        else:
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function's code looks up, those of lambdas and comprehensions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
