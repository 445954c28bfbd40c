"""The loaders that a script makes, by the line that makes them: a loader for each epoch comes from the same one."""

from __future__ import annotations

from typing import Any


class LoadersMade:
    """The loaders that a script made itself."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str]] = []

    def add(self, loader: Any, frame: Any) -> None:
        """A loader, and the frame that made it."""
        self._all.append((loader, f"{frame.f_code.co_filename}:{frame.f_lineno}"))

    def made_as(self, loader: Any, other: Any) -> bool:
        """True if both loaders were made at one line."""
        return not self._places(loader).isdisjoint(self._places(other))

    def _places(self, loader: Any) -> set[str]:
        """Where a loader was made, or the one whose batches Accelerate's own delivers."""
        batches = getattr(loader, "batch_sampler", None)
        return {
            place
            for made, place in self._all
            if made is loader or (batches is not None and made.batch_sampler is batches)
        }
