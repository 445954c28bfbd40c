"""Autocast regions around a forward pass, entered again or left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def autocast_now() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A way back into the autocast regions of this moment."""
    regions = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cuda", "cpu")]
    cache = torch.is_autocast_cache_enabled()

    def enter() -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for kind, dtype, enabled in regions:
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        return stack

    return enter


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """A backward pass runs outside autocast, as it does where a script calls it."""
    with contextlib.ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
