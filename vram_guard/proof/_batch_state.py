"""Entries that a step puts into the batch that it was given, where hooks after the step may look for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from vram_guard.state.containers import parts_of
from vram_guard.state.reached import ObjectWalk, key_of


class BatchState:
    """The parts of a batch before the step.

    Args:
        batch: that the step is about to get.

    Attributes:
        known: identities of its containers and of the objects in them: each micro-batch has others.
    """

    def __init__(self, batch: Any) -> None:
        self._parts = dict(parts_of(batch))
        self.known: set[Hashable] = {key_of(holder) for holder in ObjectWalk([("batch", batch)])}

    def changed(self, batch: Any) -> Iterator[str]:
        """Parts that are new by now, or other objects: "batch['features']".

        Args:
            batch: the same one.
        """
        now = dict(parts_of(batch))
        for path in {**self._parts, **now}:
            if path not in now or path not in self._parts or now[path] is not self._parts[path]:
                yield "batch" + "".join(f"[{key!r}]" for key in path)
