"""What hooks may switch to have a step do otherwise: attributes of the model, and places that numbers name."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from numbers import Complex
from typing import Any

import torch
from torch import nn

from vram_guard.guard.step_state import simple
from vram_guard.limits import LONGEST_SWITCHES
from vram_guard.state.containers import MUTABLE

_WITHOUT_PARTS = (nn.Module, torch.Tensor, type, torch.device, torch.dtype, Enum)


class ModelAttributes:
    """The attributes of a model's modules, which hooks set to have another loss computed.

    Metrics of torchmetrics count and collect, and switch nothing: theirs are left out.

    Args:
        model: that is trained.
        besides: names that the framework itself sets.
    """

    def __init__(self, model: nn.Module, besides: Iterable[str] = ()) -> None:
        self._model = model
        self._besides = {*vars(nn.Module()), *besides}
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Module -> the identities of its attributes, and what they are; none where they can change inside."""
        self._kept: set[str] = set()
        """Names of what steps themselves keep: outputs that are collected, tensors of the last batch."""

    def now(self) -> dict[str, Any]:
        """What they are, by their names."""
        found: dict[str, Any] = {}
        for path, module in _named(self._model):
            own = vars(module)
            identities = (path, *map(id, own.values()))
            known = self._known.get(id(module))
            if known is None or known[0] != identities:
                switches = {} if _is_metric(module) else {n: one for n, one in own.items() if n not in self._besides}
                known = identities, {f"{path}.{name}".lstrip("."): _switch(one) for name, one in switches.items()}
                if not any(map(_has_parts, switches.values())):
                    self._known[id(module)] = known
            found.update(known[1])
        return {name: value for name, value in found.items() if name not in self._kept} if self._kept else found

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What the step inside the block keeps of itself is none of a hook's switches from now on."""
        before = self.now()
        yield
        for name, value in self.now().items():
            if value != before.get(name) and not isinstance(value, (bool, int, str)):
                self._kept.add(name)

    def places(self, words: tuple[str, ...]) -> set[int]:
        """Epochs and steps that attributes name, whose names have one of these words."""
        return {
            value
            for _path, module in _named(self._model)
            for name, value in vars(module).items()
            if type(value) is int and name not in self._besides and any(word in name for word in words)
        }


class _Collected(list[Any]):
    """Numbers that hooks may collect: more of them, or fewer, are as good as the same ones."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Collected) and all(map(operator.eq, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _switch(value: Any) -> Any:
    """An attribute as far as it decides about a step."""
    if isinstance(value, dict) and len(value) <= LONGEST_SWITCHES:
        return {str(key): _switch(one) for key, one in value.items()}
    if isinstance(value, (list, deque)) and len(value) <= LONGEST_SWITCHES and all(map(_is_measured, value)):
        return _Collected(map(simple, value))
    return simple(value)


def _is_measured(value: Any) -> bool:
    """True for numbers, tensors, and tuples of these with words."""
    if isinstance(value, tuple):
        return all(isinstance(one, str) or _is_measured(one) for one in value)
    return isinstance(value, (Complex, torch.Tensor))


def _named(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all that is in it by their paths, some several times: ``named_modules()`` takes longer."""
    yield path, module
    for name, part in vars(module)["_modules"].items():
        if part is not None:
            yield from _named(part, f"{path}.{name}" if path else name)


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__ == "torchmetrics.metric" for base in type(module).__mro__)


def _has_parts(value: Any) -> bool:
    """True for what can change without being another object: containers, and objects that are no modules or tensors."""
    return isinstance(value, MUTABLE) or (hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_PARTS))


def overriding(hooks: Iterable[Any], names: tuple[str, ...], base: type) -> list[Any]:
    """The hooks that do something there where their base class does nothing."""
    own = {name: getattr(base, name) for name in names}
    return [hook for hook in hooks if any(getattr(type(hook), name, one) is not one for name, one in own.items())]


def numbers_of(part: Any, depth: int = 3) -> Iterator[int]:
    """The whole numbers among an object's attributes, nested ones too."""
    if type(part) is int:
        if part > 0:
            yield part
    elif depth and isinstance(part, (list, tuple, set, dict)) and len(part) <= LONGEST_SWITCHES:
        for one in [*part, *(part.values() if isinstance(part, dict) else ())]:
            yield from numbers_of(one, depth - 1)
    elif depth == 3 and hasattr(part, "__dict__"):
        for one in vars(part).values():
            yield from numbers_of(one, depth - 1)
