"""Parameters on the host: FSDP2 with CPU offload, in one process.

Parameters, their gradients and the optimizer states lie in host memory. Before a module's forward, and again before its
backward, FSDP copies its parameters to the device; after each it frees the copies, and it carries the gradients to the
host as soon as they are complete. Everything that is not inside a named module is one more such group, which stays on
the device from its forward to its backward (``fully_shard``'s default for the root).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.techniques.host_modules import all_paths, keep_parameters_in_place, shared_parameter
from vram_guard.torch_release import torch_release

if TYPE_CHECKING:
    import torch
    from torch import nn

#: ``torch.distributed.fsdp.fully_shard`` is public since this release.
SINCE = (2, 6)


def offload_parameters(
    model: nn.Module,
    names: Iterable[str],
    device: torch.device | str = "cuda",
    precision: str = "32-true",
    mesh: Any = None,
) -> None:
    """Keep the model's parameters on the host and let the named modules' come to the device one module at a time.

    Call it with the model in host memory and before the optimizer is built: parameters become DTensors. Moving the
    model afterwards (``model.to("cuda")``) moves its buffers only. Accumulation, ``clip_grad_norm_``, schedulers, the
    optimizer work as ever; ``model.state_dict()`` holds DTensors (``tensor.full_tensor()`` is the plain one). With
    "bf16-mixed" the copies on the device are bfloat16, which autocast would make of them anyway, and gradients are
    carried over in float32; vectors such as normalisations' scales are rounded too, which autocast leaves alone.

    Where no process group is there, one for this process alone is made, with gloo for the host's part.

    Args:
        model: the whole model; it is changed in place, for good.
        names: modules that are used one after another, as in ``model.named_modules()``.
        device: where the model trains.
        precision: the step's, in Lightning's words.
        mesh: the device mesh, of one process; None: made here.

    Raises:
        InvalidInputError: the model has no such module, or the module has no parameters or no forward.
        UnsupportedTechniqueError: this torch, precision, process group or model cannot be used so; nothing was changed.
    """
    import torch

    names = tuple(dict.fromkeys(names))
    check_torch()
    if precision == "16-mixed":
        raise UnsupportedTechniqueError(_("parameters_on_host does not work with 16-mixed: use bf16-mixed or 32-true"))
    _check_modules(model, names)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = torch.device(device)
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = _mesh_of_one(device) if mesh is None else mesh
    settings = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    # From the inside out, as fully_shard asks: a group takes what no group inside it has taken.
    for name in sorted(filter(None, names), key=lambda name: -name.count(".")):
        fully_shard(model.get_submodule(name), reshard_after_forward=True, **settings)
    fully_shard(model, **settings)
    keep_parameters_in_place(model)


def check_torch() -> None:
    """Refuse a torch without FSDP2.

    Raises:
        UnsupportedTechniqueError: torch is older than :data:`SINCE`, or was built without torch.distributed.
    """
    import torch

    if torch_release() < SINCE:
        raise UnsupportedTechniqueError(
            _("parameters_on_host needs torch 2.6 or later, not {version}", version=torch.__version__)
        )
    if not torch.distributed.is_available():
        raise UnsupportedTechniqueError(_("parameters_on_host needs torch.distributed, which this torch lacks"))


def _check_modules(model: nn.Module, names: Iterable[str]) -> None:
    # In a function of its own: what it holds would keep the parameters on the device that the host is about to get.
    modules, paths = dict(model.named_modules()), all_paths(model)
    for name in filter(None, names):
        _check_module(model, name, modules, paths)


def _check_module(
    model: nn.Module, name: str, modules: Mapping[str, nn.Module], paths: Sequence[tuple[str, nn.Parameter]]
) -> None:
    from torch import nn

    if name not in modules:
        raise InvalidInputError(_("parameters_on_host: the model has no module named {name}", name=repr(name)))
    module = modules[name]
    if type(module).forward is nn.Module.forward:
        raise InvalidInputError(
            _("parameters_on_host: {name} has no forward of its own; name the modules in it", name=repr(name))
        )
    if next(module.parameters(), None) is None:
        raise InvalidInputError(_("parameters_on_host: {name} has no parameters", name=repr(name)))
    shared = shared_parameter(model, name, paths)
    if shared:
        raise UnsupportedTechniqueError(
            _(
                "{name} cannot be sharded by itself: it shares {parameter} with a module outside it; leave it out of "
                "parameters_on_host, and both are moved with the rest of the model",
                name=name,
                parameter=shared,
            )
        )


def _mesh_of_one(device: torch.device) -> Any:
    """A mesh of this process alone, within the process group that is there or a new one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if dist.get_world_size() != 1:
        raise UnsupportedTechniqueError(
            _(
                "parameters_on_host supports one process, not {count}: use FSDP itself",
                count=dist.get_world_size(),
            )
        )
    if "gloo" not in dist.get_backend_config():
        raise UnsupportedTechniqueError(
            _(
                "gradients on the host are clipped with gloo: init_process_group('cpu:gloo,cuda:nccl') instead of "
                "{backend}",
                backend=dist.get_backend_config(),
            )
        )
    return init_device_mesh(device.type, (1,))
