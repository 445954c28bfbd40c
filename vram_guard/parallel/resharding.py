"""Changes of FSDP2 modules that a user's own code has made: when gathered weights are freed, and where weights lie."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.torch_release import FULLY_SHARD_SINCE, torch_release

if TYPE_CHECKING:
    from torch import nn

#: Strategies of FullyShardedDataParallel (FSDP1) that keep gathered weights until the backward pass, and those that
#: free them after the forward.
_FREED = {"SHARD_GRAD_OP": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD"}
_KEPT = {freed: kept for kept, freed in _FREED.items()}


def other_strategy(name: str, reshard: bool) -> str | None:
    """The strategy of FullyShardedDataParallel that divides alike, and frees gathered weights at the other time.

    Args:
        name: of ``torch.distributed.fsdp.ShardingStrategy``, as written.
        reshard: True for one that frees them after the forward; False for one that keeps them.

    Returns:
        None where the one that is written does so already, or divides nothing.

    Examples:
        >>> other_strategy("SHARD_GRAD_OP", reshard=True)
        'FULL_SHARD'
        >>> other_strategy("FULL_SHARD", reshard=True)
    """
    return (_FREED if reshard else _KEPT).get(name)


def why_not_offloaded() -> str:
    """The reason why no plan lets FullyShardedDataParallel keep parameters in host memory.

    ``prepare_gradient_for_optim`` (torch/distributed/fsdp/_flat_param.py) hands over the gradient on the host whether
    this step has written it or not.
    """
    return _(
        "with cpu_offload, FullyShardedDataParallel steps a parameter that a batch leaves unused with the gradient of "
        "an earlier one; FSDP2 (fully_shard) does not"
    )


def why_not_split_on_host() -> str:
    """The reason against micro-batches where it keeps them there as written (torch's documentation of ``no_sync``)."""
    return _("FullyShardedDataParallel with cpu_offload keeps the gradients of a step's last backward pass alone")


def set_resharding(model: nn.Module, reshard: bool) -> None:
    """Free gathered weights after the forward, or keep them until the backward pass, by torch's own option.

    The outermost FSDP2 modules stay as they are: their backward begins when their forward is over.
    """
    for module in _inner(model):
        module.set_reshard_after_forward(reshard, recurse=False)


def divided_by_fsdp2(module: nn.Module) -> bool:
    """True if ``fully_shard`` was called with this module.

    Nothing is imported for it: ``torch.distributed.fsdp`` takes a second, and a module that is divided has imported it.
    torch before 2.6 has no public class of such modules.
    """
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def resharding_of(model: nn.Module) -> frozenset[bool]:
    """True, where inner FSDP2 modules free their gathered weights after the forward; False, where some keep them."""
    found = set()
    for module in _inner(model):
        state = module._get_fsdp_state()  # noqa: SLF001 - torch has no public name for what was set
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # noqa: SLF001 - older
            if group is not None:
                found.add(group.post_forward_mesh_info is not None)
    return frozenset(found)


def _inner(model: nn.Module) -> list[Any]:
    """FSDP2 modules that lie inside others."""
    found: dict[int, Any] = {}
    for outer in filter(divided_by_fsdp2, model.modules()):
        found.update((id(one), one) for one in outer.modules() if one is not outer and divided_by_fsdp2(one))
    return list(found.values())


@contextlib.contextmanager
def offloaded_where_unsaid(device: str) -> Iterator[None]:
    """Inside the block ``fully_shard`` leaves weights in host memory, unless its caller gives a policy of its own.

    Where torch has no public ``fully_shard``, FSDP2 is refused before, and there is nothing to change.

    Args:
        device: the type of the device that computes.
    """
    if torch_release() < FULLY_SHARD_SINCE:
        yield
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    function: Any = inspect.unwrap(fully_shard)
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    before = function.__kwdefaults__["offload_policy"]
    function.__kwdefaults__["offload_policy"] = policy
    try:
        yield
    finally:
        function.__kwdefaults__["offload_policy"] = before
