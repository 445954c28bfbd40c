"""Changes of a framework's objects, and how they are undone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vram_guard.patching import replace_attributes


class Applied(ExitStack):
    """The changes made for one training: :meth:`close` undoes them, the latest first; a second call does nothing.

    Attributes:
        notes: what a reader should know of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object until :meth:`close`, see :mod:`vram_guard.patching`."""
        self.callback(replace_attributes(owner, {name: value}))
