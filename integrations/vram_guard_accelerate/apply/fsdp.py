"""Parameters on the host, in a script: FSDP2 with CPU offload, switched on by Accelerate's own variables.

They are those of ``accelerate launch --use_fsdp --fsdp_version 2 --fsdp_offload_params true``: Accelerate shards the
model where the script hands it to ``prepare``, with its optimizer, and gives the optimizer the shards to update. The
blocks that the plan names are groups of their own, by their classes, as Accelerate has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard_accelerate.apply.sharded_saving import save_whole

if TYPE_CHECKING:
    from torch import nn

#: What ``accelerate launch`` passes to a script (``accelerate.utils.launch``), and what is meant by it.
VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    # Every process makes or loads its own model, as without FSDP: loading on the first alone unties tied weights of
    # models without `tie_weights`, and fails on buffers (`fsdp2_load_full_state_dict`).
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    # Checkpoints of `save_state` hold whole tensors, in one file.
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def announce(classes: Iterable[str], environment: MutableMapping[str, str] | None = None) -> None:
    """Set up Accelerate, before the script makes its Accelerator, in every process of the launch.

    Args:
        classes: names of the classes whose modules are groups of their own; none: the model is one group.
        environment: the process's variables so far; None: ``os.environ``.
    """
    environment = os.environ if environment is None else environment
    environment.update(VARIABLES)
    names = ",".join(classes)
    environment["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP" if names else "NO_WRAP"
    if names:
        environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] = names
    if "LOCAL_RANK" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))


def _free_port() -> int:
    """For the process group that FSDP2 needs, though it has one process only."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


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
def sharding(accelerator: Any, models: list[nn.Module]) -> Iterator[None]:
    """Around ``Accelerator.prepare``: the models in, sharded models out.

    Weights are those of the first process, as DistributedDataParallel has it. Afterwards ``model.to(device)`` leaves
    parameters on the host, and the model is saved whole.

    Raises:
        UnsupportedTechniqueError: Accelerate does not shard here, or parts weights that are tied.
    """
    from vram_guard.techniques.host_modules import keep_parameters_in_place

    if not accelerator.is_fsdp2:
        raise UnsupportedTechniqueError(
            _(
                "the plan keeps parameters on the host by FSDP2, which Accelerate did not switch on: it does so for "
                "GPUs only, and here it found {kind} on {device}. Leave offload_parameters out of --allow",
                kind=accelerator.distributed_type,
                device=accelerator.device,
            )
        )
    if accelerator.num_processes > 1:
        for model in models:
            _as_on_the_first(model)
    before = [_tied(model) for model in models]
    yield
    for model, tied in zip(models, before, strict=True):
        if _tied(model) != tied:
            raise UnsupportedTechniqueError(
                _(
                    "FSDP2 would separate tied weights (one of them lies in a block, or in an embedding that "
                    "Accelerate makes a group of its own): leave offload_parameters out of --allow"
                )
            )
        keep_parameters_in_place(model)
        save_whole(accelerator, model)


def _tied(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of one parameter stand together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(sorted(group)) for group in names.values() if len(group) > 1}


def _as_on_the_first(model: nn.Module) -> None:
    """Broadcast parameters and buffers, wherever they lie."""
    import torch
    from torch import distributed

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().contiguous()
            distributed.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
