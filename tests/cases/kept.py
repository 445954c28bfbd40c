"""What is still alive of the last iteration when the next one begins, seen from the user's own code.

The same code runs in a framework's real loop and in the trace of it: both must answer alike.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Watch:
    """Holds no tensor itself: memory is watched through weak references to storages."""

    def __init__(self) -> None:
        self.references: dict[str, Any] = {}
        self.at_steps: list[dict[str, int]] = []
        """The same at each step of the optimizer, of this iteration."""
        self.alive: list[dict[str, int]] = []
        """Per iteration, at its beginning: name of what the one before it made -> bytes that it still holds."""

    def begins(self) -> None:
        """A forward begins."""
        storages = {name: reference() for name, reference in self.references.items()}
        self.alive.append({name: storage.nbytes() for name, storage in storages.items() if storage is not None})

    def steps(self) -> None:
        """The optimizer steps."""
        self.begins()
        self.at_steps.append(self.alive.pop())

    def made(self, **tensors: torch.Tensor) -> None:
        """This iteration's tensors."""
        self.references = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}
