"""Helper objects of a training (hooks, callbacks, metrics), remembered and put back with what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from vram_guard.state.containers import MUTABLE, contents_of, refill
from vram_guard.state.modules import ModuleState


@contextlib.contextmanager
def attributes_kept(objects: Iterable[Any]) -> Iterator[None]:
    """Afterwards these objects have the attributes that they had, the same objects each."""
    kept = [(vars(one), dict(vars(one))) for one in objects]
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)


@contextlib.contextmanager
def objects_kept(objects: Iterable[Any], *, besides: nn.Module) -> Iterator[None]:
    """Afterwards these objects have the attributes that they had, and so have modules and containers that they hold.

    Args:
        objects: each with a ``__dict__``.
        besides: a module that is put back by others; it may be among what the objects hold.
    """
    holders = [one for one in objects if hasattr(one, "__dict__")]
    own = [vars(one) for one in holders]
    contents = contents_of(value for attributes in own for value in attributes.values())
    known = {id(part) for part in besides.modules()}
    modules = {id(part): part for part in _modules_in(own) if id(part) not in known}
    states = [ModuleState(module, contents_of(vars(module).values())) for module in modules.values()]
    parameters = {id(one): one for module in modules.values() for one in module.parameters()}
    flags = [(one, one.requires_grad, one.grad) for one in parameters.values()]
    try:
        with attributes_kept(holders):
            yield
    finally:
        for container, content in contents:
            refill(container, content)
        for state in states:
            state.restore()
        for parameter, required, gradient in flags:
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _modules_in(attributes: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules among attributes, in containers too, with all their parts."""
    pending = list(attributes)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif isinstance(value, (*MUTABLE, tuple)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
