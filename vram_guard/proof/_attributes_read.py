"""Attributes of modules that are read after a step, by hooks: what the step has kept for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from vram_guard.guard.applied import Applied


class AttributesRead:
    """Writes down which attributes of a model's modules are read while it is listening.

    Args:
        model: whose modules.
        applied: that puts things back.

    Attributes:
        listening: True while reading counts.
    """

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        self.listening = False
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._read: set[tuple[int, str]] = set()
        applied.replace(nn.Module, "__getattribute__", self._heard())

    def _heard(self) -> Any:
        def read(module: nn.Module, name: str) -> Any:
            if self.listening:
                self._read.add((id(module), name))
            return object.__getattribute__(module, name)

        return read

    def names(self) -> frozenset[str]:
        """As :attr:`vram_guard.proof.observed.Observed.attributes` names them."""
        paths = ((self._paths[key], name) for key, name in self._read if key in self._paths)
        return frozenset(f"{path}.{name}" if path else name for path, name in paths)
