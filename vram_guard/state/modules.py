"""Modules' own attributes and running statistics, remembered and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from vram_guard.state.containers import refill


class ModuleState:
    """One module's class and attributes, and what some of its containers hold.

    Args:
        module: whose.
        contents: mutable containers among its attributes, each with the content to put back.
    """

    def __init__(self, module: nn.Module, contents: list[tuple[Any, Any]]) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = contents
        self._kind = type(module)

    def restore(self) -> None:
        """Put everything back; tensors keep what they hold now."""
        if type(self.module) is not self._kind:  # FSDP gives a module a class of its own
            self.module.__class__ = self._kind
        own = vars(self.module)
        own.clear()
        own.update(self.attributes)
        for container, content in self.contents:
            refill(container, content)


def within(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all that is in it, some several times: ``modules()`` takes ten times as long."""
    pending = [module]
    while pending:
        part = pending.pop()
        yield part
        pending += [one for one in vars(part)["_modules"].values() if one is not None]


def normalisation_buffers(model: nn.Module) -> frozenset[str]:
    """Running statistics and counters, which a step in micro-batches is known to advance in another way.

    Example:
        >>> sorted(normalisation_buffers(nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))))
        ['0.num_batches_tracked', '0.running_mean', '0.running_var']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001 - the base of batch and instance norm
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """A forward that runs again leaves the running statistics of batch normalisation alone."""
    before = [
        (module, module.momentum, module.num_batches_tracked)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats  # noqa: SLF001
    ]
    try:
        for module, _, counted in before:
            module.momentum = 0.0
            module.num_batches_tracked = None if counted is None else counted.clone()
        yield
    finally:
        for module, momentum, counted in before:
            module.momentum = momentum
            module.num_batches_tracked = counted
