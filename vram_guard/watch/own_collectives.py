"""Calls of the user's code for which all ranks wait for each other, noticed before they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vram_guard.patching import replace_attributes

#: Methods of ``torch.distributed.ProcessGroup`` by which functions of ``torch.distributed`` reach the other ranks. Not
#: those between two ranks.
_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall", "alltoall_base"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


@contextlib.contextmanager
def noticed(begins: Callable[[], None]) -> Iterator[None]:
    """Inside the block, ``begins`` is called before each call over a group of all ranks, and may raise.

    Calls that ``begins`` makes itself are not noticed.
    """
    import torch.distributed as dist

    inside = False

    def called(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if not inside and group.size() == dist.get_world_size():
            inside = True
            try:
                begins()
            finally:
                inside = False
        return original(group, *args, **kwargs)

    def in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, *args, **kwargs: called(original, group, *args, **kwargs)

    kind: Any = dist.ProcessGroup
    undo = replace_attributes(
        kind, {name: in_place_of(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
    )
    try:
        yield
    finally:
        undo()
