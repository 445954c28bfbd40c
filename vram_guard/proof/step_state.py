"""State that a step advances itself, seen in a symbolic run of it: counters, queues, averaged weights."""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from vram_guard.state.modules import normalisation_buffers
from vram_guard.state.reached import FRAMEWORKS, OF_EVERY_MODULE, RECORDERS, ReachedState, has_state, key_of
from vram_guard.tensors import storage_of, version_of
from vram_guard.user_code import is_installed_file


class StepState:
    """What a model and the code of its step hold, before the step computes its loss.

    Args:
        model: that is trained.
        loss: the function that computes the loss.
        optimizer: whose settings the step may change; None: it has none.

    Attributes:
        beyond: what they lead to and what cannot be looked into, with its kind; whether a step changes it is not known.
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._optimizer = optimizer
        self._settings = _settings(optimizer)
        roots = [(path, part) for path, part in model.named_modules() if _is_users(part)]
        self._reached = ReachedState([*roots, ("", loss)], lambda value: not _is_users(value))
        self.beyond = self._reached.beyond
        # Of other modules, tensors, arrays and generators are looked at: their tables are theirs.
        others = (
            pair for path, part in model.named_modules() if not _is_users(part) for pair in _attributes(path, part)
        )
        self._others = ReachedState(others, lambda _value: True, globals_too=False)
        left_out = normalisation_buffers(model)
        own = (*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] not in left_out))
        named = {
            id(one): (name, one)
            for name, one in (*self._others.tensors.values(), *self._reached.tensors.values(), *own)
        }
        buffers = {id(one) for name, one in model.named_buffers() if name in left_out}
        self._tensors = [(name, one, version_of(one)) for key, (name, one) in named.items() if key not in buffers]

    def changed(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """The names that hold something else by now, with the shape of what is a tensor."""
        for name, value in self._reached.kept():
            seen = isinstance(value, torch.Tensor) or has_state(value) or _is_users(value)
            if seen and not name.rpartition(".")[2].startswith("__"):
                yield name, tuple(value.shape) if isinstance(value, torch.Tensor) else None
        yield from ((name, None) for name, value in self._others.kept() if has_state(value))
        now = _settings(self._optimizer)
        yield from ((name, None) for name in {**self._settings, **now} if self._settings.get(name) != now.get(name))

    def known(self) -> set[Hashable]:
        """Keys of what :meth:`changed` compares, as ``Writes.elsewhere`` has them."""
        return {key_of(holder) for holder in self._reached.found}

    def written(self, storages: Container[int]) -> Iterator[str]:
        """The names of tensors that were written in place, also past autograd into one of these storages."""
        for name, one, version in self._tensors:
            if version_of(one) != version or storage_of(one) in storages:
                yield name


def _settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Numbers of an optimizer's groups."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        f"param_groups[{at}][{name!r}]": value
        for at, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple))
    }


def _attributes(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = ((name, one) for name, one in vars(module).items() if name not in OF_EVERY_MODULE)
    yield from ((f"{path}.{name}" if path else name, one) for name, one in own)


def _is_users(value: Any) -> bool:
    """True for what the training's own code defines, and for values and containers of Python's own types."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    home = str(named.__module__).partition(".")[0]
    return home not in FRAMEWORKS | RECORDERS and not home.startswith("vram_guard") and not _is_installed(home)


@cache
def _is_installed(package: str) -> bool:
    return is_installed_file(str(getattr(sys.modules.get(package), "__file__", None) or ""))
