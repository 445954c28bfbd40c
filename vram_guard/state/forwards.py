"""A forward that runs twice leaves what it leaves once: buffers, modules' attributes, Python's and NumPy's draws."""

# ruff: noqa: SLF001 - buffers as the module keeps them

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vram_guard.state.containers import alike
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import version_of

INSTANCE_NORMALISATION = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: Modules whose kernels work from the batch's own statistics in training, and write running ones.
NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *INSTANCE_NORMALISATION,
)

_ABSENT: Any = object()


class FirstForward:
    """Around a forward: what it changes that a second one has to find as the first one did.

    These are buffers that are replaced or written (not those written through ``.data``, which nothing counts),
    attributes that get another value, and the generators of Python and NumPy. Kept is only what did change. What else
    a forward may change is found beforehand, see :mod:`vram_guard.techniques.purity`.

    Args:
        module: whose forward it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._before: list[dict[str, Any]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor | None]] = []
        self.random: RandomState | None = None
        """The generators of Python and NumPy before the forward; None where it draws from neither."""
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        """Modules and the values that attributes had before the forward."""
        self.written: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        """Module, name and value before the forward; None where the value makes no difference."""

    def __enter__(self) -> None:
        self._before = [vars(module).copy() for module in self._modules]
        # Normalisation in training works from the batch's own statistics, whatever the running ones are.
        with torch.no_grad():
            self._buffers = [
                (owner, name, one, version_of(one), None if isinstance(owner, NORMALISATION) else one.detach().clone())
                for owner in self._modules
                for name, one in owner._buffers.items()
                if one is not None and not one.is_inference()
            ]
        self.random = RandomState(of_torch=False)

    def __exit__(self, *error: object) -> None:
        if self.random is not None and self.random.is_current():
            self.random = None
        self.attributes = [
            (module, {name: before.get(name, _ABSENT) for name in _changed(before, vars(module))})
            for module, before in zip(self._modules, self._before, strict=True)
            if not alike(before, vars(module))
        ]
        self.written = [
            (owner, name, copy)
            for owner, name, buffer, version, copy in self._buffers
            if counts_as_written(owner, name, id(buffer), version)
        ]
        self._modules, self._before, self._buffers = [], [], []


class SecondForward:
    """Around the forward that runs again: it starts from what the first one found, and changes nothing.

    Entered as often as the backward pass is run (``retain_graph``).
    """

    def __init__(self, first: FirstForward) -> None:
        self._first = first
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._buffers: list[torch.Tensor | None] = []
        self._random: RandomState | None = None

    def __enter__(self) -> None:
        first = self._first
        if first.random is not None:
            self._random = RandomState(of_torch=False)
            first.random.restore()
        self._attributes = [
            (module, {name: vars(module).get(name, _ABSENT) for name in before}) for module, before in first.attributes
        ]
        _set(first.attributes)
        self._buffers = [getattr(owner, name) for owner, name, _ in first.written]
        with torch.no_grad():
            for (owner, name, before), own in zip(first.written, self._buffers, strict=True):
                start = own if before is None else before
                setattr(owner, name, None if start is None else start.detach().clone())

    def __exit__(self, *error: object) -> None:
        for (owner, name, _), own in zip(self._first.written, self._buffers, strict=True):
            setattr(owner, name, own)
        _set(self._attributes)
        if self._random is not None:
            self._random.restore()
        self._attributes, self._buffers, self._random = [], [], None


def counts_as_written(owner: nn.Module, name: str, identity: int, version: int) -> bool:
    """True if a buffer is seen to have been replaced or written, and is put back for a second forward.

    Args:
        owner: its module.
        name: its name there.
        identity: ``id`` of the buffer before.
        version: its version before.
    """
    now = owner._buffers.get(name)
    # Kernels of batch normalisation write running statistics without raising their version counters.
    statistics = owner.training and getattr(owner, "running_mean", None) is not None
    return now is None or id(now) != identity or version_of(now) != version or statistics


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, _ABSENT) is not after.get(name, _ABSENT)]


def _set(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give modules these attributes, past ``nn.Module.__setattr__``, which would register tensors."""
    for module, values in attributes:
        own = vars(module)
        for name, value in values.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
