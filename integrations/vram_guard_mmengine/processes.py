"""The processes of a Runner, for :mod:`vram_guard.capture.ranks`."""

from __future__ import annotations

from typing import Any

from mmengine.dist import broadcast_object_list, get_rank, get_world_size


class Processes:
    """MMEngine's own view of torch.distributed; one process where that is not used."""

    @property
    def rank(self) -> int:
        """This process."""
        return int(get_rank())

    @property
    def world_size(self) -> int:
        """How many there are."""
        return int(get_world_size())

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank ``source``, on every rank."""
        holder = [value]
        broadcast_object_list(holder, src=source)
        return holder[0]
