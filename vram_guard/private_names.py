"""Private names of other libraries: tables list them, and this checks that a release still has them."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Hashable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from vram_guard.language import _

_ABSENT: Any = object()


class PrivateName(NamedTuple):
    """One name that a library does not promise to keep."""

    path: str
    """"package.module:Class.attribute"; an attribute may also be one that instances get in ``__init__``."""
    used_for: str
    parameters: tuple[str, ...] = ()
    """Parameters that a method must take after ``self``, in this order; () where it is not a method or takes any."""

    @property
    def dotted(self) -> str:
        """The path as Python code writes it."""
        return self.path.replace(":", ".")

    def within(self, package: str) -> PrivateName:
        """The name in a library that is installed under several: the path of this one begins below ``package``."""
        return self._replace(path=f"{package}.{self.path}")


def missing_names(names: Iterable[PrivateName]) -> list[PrivateName]:
    """The names that the installed release does not have, or has with other parameters."""
    return [name for name in names if _fault(name)]


def missing_in_words(names: Iterable[PrivateName]) -> list[str]:
    """A line for each name that the installed release does not have, with what it is used for."""
    found = ((name, _fault(name)) for name in names)
    return [
        _("{name}: {problem} (used for: {purpose})", name=name.dotted, problem=fault, purpose=name.used_for)
        for name, fault in found
        if fault
    ]


def _fault(name: PrivateName) -> str:
    """The reason why a name cannot be used; "" where it can."""
    reached, _colon, attributes = name.path.partition(":")
    found = _module(reached)
    for attribute in attributes.split("."):
        if found is _ABSENT:
            break
        owner, found = found, getattr(found, attribute, _ABSENT)
        reached = f"{reached}.{attribute}"
        if found is _ABSENT and isinstance(owner, Hashable) and _set_on_instances(owner, attribute):
            return ""
    if found is _ABSENT:
        return _("there is no {name}", name=reached)
    if name.parameters:
        given = tuple(inspect.signature(found).parameters)[1:]
        if given[: len(name.parameters)] != name.parameters:
            return _("takes {given}, not {wanted}", given=given, wanted=name.parameters)
    return ""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        # torch._C is not a package: its submodules are attributes.
        parent, _dot, last = name.rpartition(".")
        return getattr(_module(parent), last, _ABSENT) if parent else _ABSENT


@functools.cache
def _set_on_instances(owner: Any, attribute: str) -> bool:
    """True if a class annotates the attribute (a data class) or assigns it in its methods, which every trace asks."""
    if not inspect.isclass(owner):
        return False
    if any(attribute in vars(base).get("__annotations__", {}) for base in owner.__mro__):
        return True
    members = (one for base in owner.__mro__ for one in vars(base).values())
    functions = (inspect.unwrap(one) for one in members if inspect.isfunction(one))
    return any(_assigns(one.__code__, attribute) for one in functions)


def _assigns(code: CodeType, attribute: str) -> bool:
    """True if this code, or a function in it, assigns an attribute of this name.

    Instructions are asked, not the source: finding the source of a class in a file takes a hundred times as long.
    """
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    named = attribute in code.co_names and any(
        one.opname == "STORE_ATTR" and one.argval == attribute for one in dis.get_instructions(code)
    )
    return named or any(_assigns(one, attribute) for one in inner)
