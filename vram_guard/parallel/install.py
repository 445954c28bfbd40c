"""A layout put on a model: ``fully_shard`` by blocks, or the user's own code.

The same in a trace, whose ranks are pretended, and in a real training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.parallel import _tensor
from vram_guard.parallel.data_parallel import flattened, replicated
from vram_guard.parallel.deepspeed import STAGES, deepspeed_library
from vram_guard.parallel.meshes import mesh_of
from vram_guard.techniques.blocks import find_blocks, named_blocks
from vram_guard.techniques.host_modules import shared_parameter
from vram_guard.torch_release import FULLY_SHARD_SINCE, torch_release

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.parallel.spec import Parallel

Installer = Callable[["nn.Module", "Parallel", Any], "nn.Module"]


def check(model: nn.Module, parallel: Parallel) -> None:
    """Refuse a layout that cannot be put on this model, before anything is changed.

    Raises:
        InvalidInputError: the layout names modules that the model does not have.
        UnsupportedTechniqueError: this torch, this kind or a module of the model cannot be used so.
    """
    if parallel.apply is not None:
        return
    if parallel.kind in STAGES:
        deepspeed_library()
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise UnsupportedTechniqueError(
                _("the model was made in deepspeed.zero.Init, which has divided it already: make it outside")
            )
        return
    if parallel.kind not in (*_INSTALLERS, *_WHOLE):
        raise UnsupportedTechniqueError(_("{kind} cannot be predicted yet", kind=parallel.kind))
    _check_torch(parallel)
    if parallel.tensor > 1:
        _tensor.plan_of(model, parallel.tensor)
    if parallel.kind not in _WHOLE and (parallel.shards > 1 or parallel.blocks):
        blocks_of(model, parallel)


def install(model: nn.Module, parallel: Parallel, mesh: Any, **ddp_options: Any) -> nn.Module:
    """Put a layout on a model; call it before the optimizer is built.

    Args:
        model: the whole model, changed in place; on the meta device, in host memory or on the device.
        parallel: the layout.
        mesh: of :func:`vram_guard.parallel.meshes.make_mesh`.
        ddp_options: arguments of DistributedDataParallel, for "ddp" and "zero1".

    Returns:
        The module to train with: the model, or what wraps it.

    Raises:
        InvalidInputError: the layout names modules that the model does not have, or ``apply`` returns no module.
        UnsupportedTechniqueError: this torch, this kind or a module of the model cannot be used so.
    """
    check(model, parallel)
    if parallel.apply is None:
        if parallel.tensor > 1:
            _tensor.install(model, mesh_of(mesh, "tensor"))
        if parallel.kind in STAGES:
            return model  # the engine is made with the optimizer
        if parallel.kind in _WHOLE:
            return model if parallel.tensor > 1 else replicated(model, mesh, ddp_options)
        put_on: Installer = _INSTALLERS[str(parallel.kind)]
        return put_on(model, parallel, mesh)
    from torch import nn

    with _errors_of_apply():
        made = parallel.apply(model, mesh)
    if not isinstance(made, nn.Module):
        raise InvalidInputError(
            _(
                "apply(model, mesh) returned a {kind}; it must return the module that the loss is called with",
                kind=type(made).__name__,
            )
        )
    return made


@contextlib.contextmanager
def _errors_of_apply() -> Iterator[None]:
    """Errors of torch's that come of how ``apply`` is called, in words that say what to do.

    Raises:
        InvalidInputError: in place of torch's own error.
    """
    try:
        yield
    except NotImplementedError as error:
        if "Cannot copy out of meta tensor" not in str(error):
            raise
        raise InvalidInputError(
            _(
                "apply moves a model that was made on the meta device, where it has no values: say "
                'Parallel(init="cpu") where it is made in host memory, or let apply use to_empty'
            )
        ) from error
    except ValueError as error:
        if "default process group twice" not in str(error):
            raise
        raise InvalidInputError(
            _("apply is called within a process group: leave init_process_group out, and take the groups of the mesh")
        ) from error


def blocks_of(model: nn.Module, parallel: Parallel) -> tuple[str, ...]:
    """Names of the modules that are sharded one by one, those inside others first, as ``fully_shard`` asks.

    Raises:
        InvalidInputError: the layout names modules that the model does not have.
        UnsupportedTechniqueError: a named module shares a parameter with the rest of the model.
    """
    if parallel.blocks is None:
        found = find_blocks(model, checkpointed=True)
        if len(dict(model.named_parameters())) < len(dict(model.named_parameters(remove_duplicate=False))):
            # What shares a parameter with the rest of the model is gathered with the rest.
            found = tuple(block for block in found if not shared_parameter(model, block.name))
        return tuple(block.name for block in found)
    for block in named_blocks(model, parallel.blocks):
        shared = shared_parameter(model, block.name)
        if shared:
            raise UnsupportedTechniqueError(
                _(
                    "{name} cannot be sharded by itself: it shares {parameter} with a module outside it; leave it out "
                    "of blocks",
                    name=block.name,
                    parameter=shared,
                )
            )
    return tuple(sorted(parallel.blocks, key=lambda name: -name.count(".")))


def _fully_shard(model: nn.Module, parallel: Parallel, mesh: Any) -> nn.Module:
    """FSDP2: each block a group of parameters, and the rest of the model one more.

    The last block is treated as any other, and the root as ``fully_shard`` treats it: its parameters stay gathered
    from the forward to the backward.
    """
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    names = ("replicate", "shard") if parallel.kind == "hsdp" else ("shard",)
    settings: dict[str, Any] = {
        "mesh": mesh_of(mesh, *names),
        "mp_policy": MixedPrecisionPolicy(dtype(parallel.param_dtype), dtype(parallel.reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if parallel.offload
        else OffloadPolicy(),
    }
    for name in blocks_of(model, parallel):
        fully_shard(model.get_submodule(name), reshard_after_forward=parallel.reshard, **settings)
    fully_shard(model, reshard_after_forward=None if parallel.reshard else False, **settings)
    return model


def _flatten(model: nn.Module, parallel: Parallel, mesh: Any) -> nn.Module:
    return flattened(model, parallel, mesh, blocks_of(model, parallel))


def _check_torch(parallel: Parallel) -> None:
    import torch

    if parallel.kind in ("fsdp2", "hsdp") and torch_release() < FULLY_SHARD_SINCE:
        raise UnsupportedTechniqueError(
            _("fully_shard needs torch 2.6 or later, not {version}", version=torch.__version__)
        )
    if not torch.distributed.is_available():
        raise UnsupportedTechniqueError(_("this torch was built without torch.distributed"))


#: Kinds that leave parameters whole on each rank.
_WHOLE = ("ddp", "zero1")

_INSTALLERS: dict[str, Installer] = {"fsdp2": _fully_shard, "hsdp": _fully_shard, "fsdp1": _flatten}
