"""What a forward pass finds around it, so that it can run once more as it did: random numbers, autocast, statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class RandomState:
    """The random number generators when a slice's forward began."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers once more inside the block; afterwards the generators go on where they were."""
        now = RandomState()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)


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


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """A forward that runs again leaves the running statistics of batch normalisation alone."""
    kept = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats  # noqa: SLF001
    ]
    before = [(module, module.momentum, module.num_batches_tracked) for module in kept]
    try:
        for module, _, counted in before:
            module.momentum = 0.0
            module.num_batches_tracked = None if counted is None else counted.clone()
        yield
    finally:
        for module, momentum, counted in before:
            module.momentum = momentum
            module.num_batches_tracked = counted
