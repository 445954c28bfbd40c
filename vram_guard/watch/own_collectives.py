"""Calls of the user's code for which all ranks wait for each other, refused before they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
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
def refused() -> Iterator[None]:
    """Inside the block, a call over a group of all ranks raises ``UnsupportedStepError`` before it begins."""
    import torch
    import torch.distributed as dist

    def functional(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            name = str(operator._qualified_op_name)  # noqa: SLF001 - no public one tells the library
            if name.startswith(_FUNCTIONAL) and not name.endswith("wait_tensor"):
                _refuse_all_ranks(_group(kwargs.get("group_name", args[-1] if args else None)))
            return original(operator, *args, **kwargs)

        return call

    def in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_all_ranks(group)
            return original(group, *args, **kwargs)

        return call

    kind: Any = dist.ProcessGroup
    with contextlib.ExitStack() as undo:
        methods = {name: in_place_of(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
        undo.callback(replace_attributes(kind, methods))
        operator = torch._ops.OpOverloadPacket  # noqa: SLF001 - what torch.ops hands out
        undo.callback(replace_attributes(operator, {"__call__": functional(operator.__call__)}))
        yield


def _refuse_all_ranks(group: Any) -> None:
    import torch.distributed as dist

    if group.size() != dist.get_world_size():
        return
    raise UnsupportedStepError(
        _(
            "the training step calls the other ranks itself, and this batch is not cut into as many micro-batches on "
            "each of them: some would wait for others for ever. Allow no micro-batches (leave out accumulate), or let "
            "all ranks load batches of one size"
        )
    )


def _group(named: Any) -> Any:
    """The group that an operator is given, by its name or itself."""
    from torch.distributed import distributed_c10d

    names: Any = distributed_c10d
    return names._resolve_process_group(named) if isinstance(named, str) else named  # noqa: SLF001 - torch has no other
