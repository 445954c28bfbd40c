"""Changes of a framework's objects, and how they are undone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Applied(ExitStack):
    """The changes made for one training: :meth:`close` undoes them, the latest first; a second call does nothing.

    Attributes:
        notes: what a reader should know of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object; undone, it has its own again, or that of its class where it had none."""
        own = name in vars(owner) or isinstance(getattr(type(owner), name, None), property)
        before = getattr(owner, name) if own else None
        setattr(owner, name, value)

        def undo() -> None:
            if own:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)

        self.callback(undo)
