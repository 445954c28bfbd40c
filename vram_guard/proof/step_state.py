"""State that a step advances itself, seen in a symbolic run of it: counters, queues, averaged weights."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Container, Iterator
from functools import cache
from random import Random
from types import FunctionType
from typing import Any

import torch
from torch import nn

from vram_guard.apply.loss_terms import parts_of
from vram_guard.language import _
from vram_guard.proof.observed import normalisation_buffers
from vram_guard.state.reached import ReachedState
from vram_guard.tensors import storage_of, version_of
from vram_guard.user_code import is_installed_file

#: Packages whose objects hold nothing that a step advances, or what their adapter knows how to advance.
_KNOWN = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "mmengine")
#: Containers within containers that are looked into, and the longest.
_DEEPEST, _LONGEST = 3, 4096
#: Attributes that every module has.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Elements of a NumPy array that is compared.
_LARGEST = 2**20


class StepState:
    """What a model and the code of its step hold, before the step computes its loss.

    Args:
        model: that is trained.
        loss: the function that computes the loss.
        optimizer: whose settings the step may change; None: it has none.
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._settings = _settings(optimizer)
        roots = [(path, part) for path, part in model.named_modules() if _is_users(part)]
        self._reached = ReachedState([*roots, ("", loss)], passed_over=lambda value: not _is_users(value))
        self._versions = {name: (id(one), version_of(one)) for name, one in _tensors(model)}
        self._values = dict(_values(model))

    def changed(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """The names that hold something else by now, with the shape of what is a tensor."""
        for name, value in self._reached.kept():
            if (isinstance(value, torch.Tensor) or _is_users(value)) and not name.rpartition(".")[2].startswith("__"):
                yield name, tuple(value.shape) if isinstance(value, torch.Tensor) else None
        yield from ((name, None) for name, now in _values(self._model) if self._values.get(name, now) != now)
        now = _settings(self._optimizer)
        yield from ((name, None) for name in {**self._settings, **now} if self._settings.get(name) != now.get(name))

    def numbers(self) -> Iterator[tuple[str, str]]:
        """Names and numbers that they hold; buffers of one element as well, where that is known."""
        for name, value in (*self._reached.content(), *self._model.named_buffers()):
            yield from numbers_in(value, name)

    def written(self, storages: Container[int]) -> Iterator[str]:
        """The names of tensors that were written in place, also past autograd into one of these storages."""
        for name, one in _tensors(self._model):
            before = self._versions.get(name)
            same = before is not None and before[0] == id(one)
            if same and (before != (id(one), version_of(one)) or storage_of(one) in storages):
                yield name


def numbers_in(part: Any, name: str) -> Iterator[tuple[str, str]]:
    """Names and numbers in nested containers; tensors of one element as well, where that is known."""
    from vram_guard.simulate.device.constants import compute

    for path, one in parts_of(part):
        known = compute(one) if isinstance(one, torch.Tensor) and one.numel() == 1 else None
        number = one if known is None or known.is_meta else known.item()
        if isinstance(number, (int, float)):
            yield name + "".join(f"[{key!r}]" for key in path), repr(number)


def _settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Numbers of an optimizer's groups, and the process's environment."""
    groups = [] if optimizer is None else optimizer.param_groups
    numbers = {
        f"param_groups[{at}][{name!r}]": value
        for at, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple))
    }
    return {**numbers, **{f"os.environ[{name!r}]": value for name, value in os.environ.items()}}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, buffers and other tensors of all modules, but statistics of normalisation."""
    left_out = normalisation_buffers(model)
    yield from model.named_parameters()
    yield from ((name, one) for name, one in model.named_buffers() if name not in left_out)
    for name, one in _attributes(model):
        yield from _held(name, one, _DEEPEST)


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that an attribute is, or that its containers hold."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, (list, tuple, dict, deque)) and len(value) <= _LONGEST:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _held(f"{name}[{key!r}]", part, depth - 1)


def _values(model: nn.Module) -> Iterator[tuple[str, bytes]]:
    """NumPy arrays among the attributes, and where generators of NumPy's and Python's stand."""
    numpy = sys.modules.get("numpy")
    for name, one in _attributes(model):
        if isinstance(one, Random):
            yield _("the generator {name}", name=name), repr(one.getstate()).encode()
        elif numpy is not None and isinstance(one, numpy.random.Generator):
            yield _("the generator {name}", name=name), repr(one.bit_generator.state).encode()
        elif numpy is not None and isinstance(one, numpy.ndarray) and one.size <= _LARGEST:
            yield name, one.tobytes()


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        own = ((name, one) for name, one in vars(module).items() if name not in _OF_EVERY_MODULE)
        yield from ((f"{path}.{name}" if path else name, one) for name, one in own)


def _is_users(value: Any) -> bool:
    """True for what the training's own code defines, and for values and containers of Python's own types."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    home = str(named.__module__).partition(".")[0]
    return home not in _KNOWN and not home.startswith("vram_guard") and not _is_installed(home)


@cache
def _is_installed(package: str) -> bool:
    return is_installed_file(str(getattr(sys.modules.get(package), "__file__", None) or ""))
