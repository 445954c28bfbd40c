"""Entries that a step puts into the batch that it was given, where hooks after the step may look for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from vram_guard.state.containers import contents_of, parts_of


class BatchState:
    """The parts of a batch before the step.

    Args:
        batch: that the step is about to get.
    """

    def __init__(self, batch: Any) -> None:
        self._parts = dict(parts_of(batch))
        containers = (container for container, _content in contents_of([batch]))
        self._own: set[Hashable] = {id(one) for one in (*containers, *self._parts.values())}

    def known(self) -> set[Hashable]:
        """Identities of its containers and parts: each micro-batch has others."""
        return self._own

    def changed(self, batch: Any) -> Iterator[str]:
        """Parts that are new by now, or other objects: "batch['features']".

        Args:
            batch: the same one.
        """
        now = dict(parts_of(batch))
        for path in {**self._parts, **now}:
            if path not in now or path not in self._parts or now[path] is not self._parts[path]:
                yield "batch" + "".join(f"[{key!r}]" for key in path)
