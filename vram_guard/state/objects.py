"""Helper objects of a training (hooks, callbacks, metrics), remembered and put back with what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from vram_guard.state.reached import ReachedState


@contextlib.contextmanager
def objects_kept(objects: Iterable[Any], *, besides: nn.Module) -> Iterator[None]:
    """Afterwards these objects have the attributes that they had, and so have modules and containers that they hold.

    Args:
        objects: each with a ``__dict__``.
        besides: a module that is put back by others; it may be among what the objects hold.
    """
    own = list(objects)
    held, known = set(map(id, own)), set(map(id, besides.modules()))

    def left_alone(value: Any) -> bool:
        return id(value) in known or not (isinstance(value, nn.Module) or id(value) in held)

    state = ReachedState((("", one) for one in own), left_alone, globals_too=False)
    parameters = [one for _name, one in state.tensors.values() if isinstance(one, nn.Parameter)]
    flags = [(one, one.requires_grad, one.grad) for one in parameters]
    try:
        yield
    finally:
        state.restore()
        for parameter, required, gradient in flags:
            parameter.requires_grad_(required)
            parameter.grad = gradient
