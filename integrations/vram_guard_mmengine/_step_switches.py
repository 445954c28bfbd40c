"""What decides about a step besides what does in every framework: attributes of modules, and numbers in hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from mmengine.hooks import Hook
from torch import nn

from vram_guard.guard.step_state import simple
from vram_guard.limits import LONGEST_SWITCHES
from vram_guard.state.containers import MUTABLE

_NO_SWITCHES = frozenset((*vars(nn.Module()), "_device"))
_WITHOUT_PARTS = (nn.Module, torch.Tensor, type, torch.device, torch.dtype, Enum)


class ModelAttributes:
    """The attributes of a model's modules, which hooks of OpenMMLab set to have another loss computed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Module -> the identities of its attributes, and what they are; none where they can change inside."""

    def now(self) -> dict[str, Any]:
        """What they are, by their names."""
        found: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            own = {name: value for name, value in vars(module).items() if name not in _NO_SWITCHES}
            identities = tuple(map(id, own.values()))
            known = self._known.get(id(module))
            if known is None or known[0] != identities:
                known = identities, {f"{path}.{name}".lstrip("."): simple(value) for name, value in own.items()}
                if not any(map(_has_parts, own.values())):
                    self._known[id(module)] = known
            found.update(known[1])
        return found

    def places(self) -> set[int]:
        """Epochs and iterations that they name."""
        return {
            value
            for module in self._model.modules()
            for name, value in vars(module).items()
            if type(value) is int and ("epoch" in name or "iter" in name)
        }


def _has_parts(value: Any) -> bool:
    """True for what can change without being another object: containers, and objects that are no modules or tensors."""
    return isinstance(value, MUTABLE) or (hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_PARTS))


def overriding(hooks: Iterable[Any], names: tuple[str, ...]) -> list[Any]:
    """The hooks that do something there."""
    return [hook for hook in hooks if any(getattr(type(hook), name, None) is not getattr(Hook, name) for name in names)]


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
