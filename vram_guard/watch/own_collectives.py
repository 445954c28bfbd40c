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

#: Operators by which ``torch.distributed._functional_collectives`` do it; their last argument is the group.
_FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::")


@contextlib.contextmanager
def noticed(begins: Callable[[], None]) -> Iterator[None]:
    """Inside the block, ``begins`` is called before each call over a group of all ranks, and may raise.

    Calls that ``begins`` makes itself are not noticed.
    """
    import torch
    import torch.distributed as dist

    inside = False

    def begin(group: Any) -> None:
        nonlocal inside
        if not inside and group.size() == dist.get_world_size():
            inside = True
            try:
                begins()
            finally:
                inside = False

    def functional(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            name = str(operator._qualified_op_name)  # noqa: SLF001 - no public one tells the library
            if name.startswith(_FUNCTIONAL) and not name.endswith("wait_tensor"):
                begin(_group(kwargs.get("group_name", args[-1] if args else None)))
            return original(operator, *args, **kwargs)

        return call

    def called(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        begin(group)
        return original(group, *args, **kwargs)

    def in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, *args, **kwargs: called(original, group, *args, **kwargs)

    kind: Any = dist.ProcessGroup
    with contextlib.ExitStack() as undo:
        methods = {name: in_place_of(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
        undo.callback(replace_attributes(kind, methods))
        operator = torch._ops.OpOverloadPacket  # noqa: SLF001 - what torch.ops hands out
        undo.callback(replace_attributes(operator, {"__call__": functional(operator.__call__)}))
        yield


def _group(named: Any) -> Any:
    """The group that an operator is given, by its name or itself."""
    from torch.distributed import distributed_c10d

    names: Any = distributed_c10d
    return names._resolve_process_group(named) if isinstance(named, str) else named  # noqa: SLF001 - torch has no other
