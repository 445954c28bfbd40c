"""Old names of arguments: they work for one more release, with a warning that says the new one."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, ParamSpec, TypeVar

from vram_guard.language import _

P = ParamSpec("P")
R = TypeVar("R")

#: Settings of a guard that stand in ``advanced={...}``; they were arguments of their own.
ADVANCED: Final = (
    *("blocks", "cudnn", "gpu_memory", "host_budget", "longest_seconds", "lr_rule", "monitor"),
    *("priority", "remember", "start_seconds", "target_utilization", "whole_job"),
)


def up_to_date(given: Mapping[str, Any], holder: str, held: Iterable[str]) -> dict[str, Any]:
    """Arguments of which the old ones stand in the one that holds them now; each is warned of.

    Args:
        given: name -> value.
        holder: the argument that holds them: "advanced".
        held: the names in it.

    Example:
        >>> up_to_date({"budget": "24GiB", "advanced": {"cudnn": "off"}}, "advanced", ADVANCED)
        {'budget': '24GiB', 'advanced': {'cudnn': 'off'}}
    """
    old = {name: value for name, value in given.items() if name in set(held)}
    if not old:
        return dict(given)
    for name, value in old.items():
        warn_of(name, f"{holder}=dict({name}={value!r})")
    rest = {name: value for name, value in given.items() if name not in old}
    return {**rest, holder: {**(rest.get(holder) or {}), **old}}


def suggestion(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one; "" where none is near."""
    near = get_close_matches(str(name), tuple(known), n=1)
    return _("; did you mean {near}?", near=repr(near[0])) if near else ""


def warn_of(old: str, new: str) -> None:
    """Say that a name is an old one."""
    said = _("{old} is an old name, which the next release does not know: write {new}", old=old, new=new)
    warnings.warn(f"vram_guard: {said}", FutureWarning, stacklevel=4)


def takes_old_names(holder: str, held: Iterable[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose old arguments are found where they are now, see :func:`up_to_date`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = up_to_date(kwargs, holder, held)
            for name in given.keys() - known.keys():
                said = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(said + suggestion(name, [*known, *held]))
            return function(*args, **given)

        return call

    return decorate
