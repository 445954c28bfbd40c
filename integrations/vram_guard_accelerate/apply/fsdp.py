"""FSDP2 in a script that was not written for it, switched on by Accelerate's own variables (``_sharding_change``).

Accelerate shards the model where the script hands it to ``prepare``, with its optimizer, and gives the optimizer the
shards to update. The blocks that the plan names are groups of their own, by their classes, as Accelerate has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.parallel.in_place_of_ddp import as_on_the_first
from vram_guard_accelerate._sharding_change import ShardingChange
from vram_guard_accelerate.apply.sharded_saving import save_whole

if TYPE_CHECKING:
    from torch import nn

#: Of a script that was not written for it, with the parameters on the host; the classes of its groups are the plan's.
ON_HOST = ShardingChange(introduced=True, offload=True)


def plugin_of(given: Any) -> Any:
    """The settings of FSDP that an Accelerator will have: the script's, or those of ``accelerate launch``; or None.

    Args:
        given: that the script passes to the Accelerator, if it does.
    """
    if given is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin() if given is None else given


def on_host(plugin: Any) -> bool:
    """True if these settings keep parameters in host memory: ``CPUOffload`` of FSDP1, ``CPUOffloadPolicy`` of FSDP2."""
    policy = plugin.cpu_offload
    return bool(getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy"))


def wrapped_classes(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The classes of these modules, by which Accelerate finds them.

    Args:
        model: the whole model.
        names: as in ``model.named_modules()``; only "" (the whole model): nothing of it can be treated otherwise, as
            where it checkpoints itself. It repeats blocks all the same, perhaps.
    """
    from vram_guard.techniques import find_blocks

    if not names:
        return ()
    named = [name for name in names if name] or [block.name for block in find_blocks(model, checkpointed=True)]
    modules = (model.get_submodule(name) for name in named)
    # Accelerate looks through torch's own wrapper.
    return tuple(dict.fromkeys(type(getattr(one, "_checkpoint_wrapped_module", one)).__name__ for one in modules))


@contextlib.contextmanager
def sharding(accelerator: Any, models: list[nn.Module], change: ShardingChange) -> Iterator[None]:
    """Around ``Accelerator.prepare``: the models in, sharded models out.

    Where FSDP2 is introduced, weights are those of the first process, as DistributedDataParallel has it, and the model
    is saved whole. Where parameters lie on the host, ``model.to(device)`` leaves them there.

    Raises:
        UnsupportedTechniqueError: Accelerate does not shard here, or parts weights that are tied.
    """
    from vram_guard.techniques.host_modules import keep_parameters_in_place

    with _introduced(accelerator, models) if change.introduced else contextlib.nullcontext():
        yield
    for model in models if change.offload else ():
        keep_parameters_in_place(model)


@contextlib.contextmanager
def _introduced(accelerator: Any, models: list[nn.Module]) -> Iterator[None]:
    if not accelerator.is_fsdp2:
        raise UnsupportedTechniqueError(
            _(
                "the plan divides the model by FSDP2, which Accelerate did not switch on: it does so for GPUs only, "
                "and here it found {kind} on {device}. Leave offload_parameters and shard out of --allow",
                kind=accelerator.distributed_type,
                device=accelerator.device,
            )
        )
    if accelerator.num_processes > 1:
        for model in models:
            as_on_the_first(model, accelerator.device)
    before = [_tied(model) for model in models]
    yield
    for model, tied in zip(models, before, strict=True):
        if _tied(model) != tied:
            raise UnsupportedTechniqueError(
                _(
                    "FSDP2 would separate tied weights (one of them lies in a block, or in an embedding that "
                    "Accelerate makes a group of its own): leave offload_parameters and shard out of --allow"
                )
            )
        save_whole(accelerator, model)


def _tied(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of one parameter stand together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(sorted(group)) for group in names.values() if len(group) > 1}
