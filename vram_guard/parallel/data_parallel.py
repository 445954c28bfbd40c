"""Kinds that keep whole weights on each rank: DistributedDataParallel, ZeroRedundancyOptimizer; and FSDP1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.parallel.meshes import mesh_of
from vram_guard.techniques.optimizers import needs_closure

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.parallel.spec import Parallel


def replicated(model: nn.Module, mesh: Any, options: Mapping[str, Any]) -> nn.Module:
    """DistributedDataParallel around a model, with torch's own defaults where an option is not given."""
    from torch.nn.parallel import DistributedDataParallel

    class Replica(DistributedDataParallel):
        """As torch's; what it has not, it looks for in the model: a loss may ask that for its settings."""

        of_a_layout = True
        """Tells it from one that a script makes."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    return Replica(model, device_mesh=mesh_of(mesh, "data"), **options)


#: Arguments of DistributedDataParallel on which its memory depends; a wrapper has them as attributes.
_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "batched_grad_copy")


def options_of(wrapper: nn.Module) -> dict[str, Any]:
    """The arguments, besides the model, with which a DistributedDataParallel was made, as far as they decide memory."""
    read: Any = wrapper
    found: dict[str, Any] = {name: True for name in _OPTIONS if getattr(read, name, False)}
    if not getattr(read, "bucket_bytes_cap_default", True):
        found["bucket_cap_mb"] = read.bucket_bytes_cap / 2**20
    return {**found, **unsynchronised_buffers(not getattr(wrapper, "broadcast_buffers", True))}


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the arguments that a framework will give DistributedDataParallel."""
    found = {name: given[name] for name in (*_OPTIONS, "bucket_cap_mb") if given.get(name)}
    synchronised = given.get("forward_sync_buffers", given.get("broadcast_buffers"))
    return {**found, **unsynchronised_buffers(synchronised is False)}


def unsynchronised_buffers(off: bool) -> dict[str, Any]:
    """The argument that leaves buffers alone, by the name that this torch has for it."""
    from torch.nn.parallel import DistributedDataParallel

    if not off:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def divided_states(optimizer: torch.optim.Optimizer, mesh: Any) -> torch.optim.Optimizer:
    """ZeroRedundancyOptimizer over the same parameters: each rank has the states of its part of them.

    Raises:
        UnsupportedTechniqueError: the optimizer evaluates the loss itself, or cannot be built anew from its settings.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if needs_closure(optimizer):
        raise UnsupportedTechniqueError(
            _(
                "{optimizer} evaluates the loss itself and needs the gradients of all parameters at once: its states "
                "cannot be divided (zero1)",
                optimizer=type(optimizer).__name__,
            )
        )
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
    groups = [
        {name: value for name, value in group.items() if name in ("params", *taken)} for group in optimizer.param_groups
    ]
    try:
        made = ZeroRedundancyOptimizer(
            groups, optimizer_class=kind, process_group=mesh_of(mesh, "data").get_group(), **settings
        )
    except TypeError as error:
        raise UnsupportedTechniqueError(
            _(
                "ZeroRedundancyOptimizer cannot build {optimizer} from its settings: {error}",
                optimizer=kind.__name__,
                error=error,
            )
        ) from error
    return made


def fullest_rank(groups: Sequence[Mapping[str, Any]], ranks: int) -> int:
    """The rank to which ZeroRedundancyOptimizer gives most (``_partition_parameters``: the largest to the emptiest)."""
    held = [0] * ranks
    for group in groups:
        for parameter in sorted(group["params"], key=lambda one: one.numel(), reverse=True):
            held[held.index(min(held))] += parameter.numel()
    return held.index(max(held))


def flattened(model: nn.Module, parallel: Parallel, mesh: Any, blocks: Sequence[str]) -> nn.Module:
    """FullyShardedDataParallel (FSDP1): each block a flat parameter, and the rest of the model one more."""
    import torch
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    chosen = {model.get_submodule(name) for name in blocks}
    inside: Callable[[nn.Module], bool] = chosen.__contains__
    return FullyShardedDataParallel(
        model,
        process_group=mesh_of(mesh, "shard").get_group(),
        sharding_strategy=ShardingStrategy.FULL_SHARD if parallel.reshard else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=CustomPolicy(inside),
        # With any of it, even an empty one, FSDP wraps batch norms by themselves.
        mixed_precision=MixedPrecision(dtype(parallel.param_dtype), dtype(parallel.reduce_dtype))
        if parallel.param_dtype or parallel.reduce_dtype
        else None,
        cpu_offload=CPUOffload(offload_params=parallel.offload),
        # A number alone would make FSDP ask for the current accelerator.
        device_id=torch.device("cuda", _current_device()) if mesh.device_type == "cuda" else torch.device("cpu"),
        use_orig_params=True,
        param_init_fn=_made_empty if any(parameter.is_meta for parameter in model.parameters()) else None,
    )


def _made_empty(module: nn.Module) -> None:
    """Memory for a module that was made on the meta device; what it holds is loaded later."""
    module.to_empty(device=f"cuda:{_current_device()}", recurse=False)


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()
