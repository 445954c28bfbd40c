"""FSDP2 in place of DistributedDataParallel: a training that learns the same, and saves what it would have saved.

As under DistributedDataParallel every rank begins with the first one's weights, gradients are averaged over the ranks,
and buffers are the first rank's in every forward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import _pytree as pytree

from vram_guard.language import _
from vram_guard.parallel.install import install
from vram_guard.parallel.meshes import make_mesh
from vram_guard.parallel.resharding import divided_by_fsdp2
from vram_guard.parallel.spec import Parallel, data_parallel
from vram_guard.techniques.host_modules import keep_parameters_in_place
from vram_guard.techniques.recipe import Sharding

if TYPE_CHECKING:
    import torch

#: torch's optimizers whose update of a number depends on nothing but that number, its gradient and its states.
ELEMENTWISE = frozenset(
    ("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)

#: Bytes of buffers that are sent at once (DistributedDataParallel's ``broadcast_bucket_size``).
_SENT_AT_ONCE = 250 * 2**20


def layouts(ranks: int, *, offload: bool) -> dict[Sharding, Parallel]:
    """The ways to divide a model over so many ranks, each with its layout; none for one rank."""
    if ranks == 1:
        return {}
    ways = [Sharding(fsdp2=True, reshard=False), Sharding(fsdp2=True, reshard=True)]
    ways += [Sharding(fsdp2=True, reshard=True, offload=True)] if offload else []
    return {way: layout_of(way, ranks) for way in ways}


def layout_of(sharding: Sharding, ranks: int) -> Parallel:
    """The layout of one of them."""
    return data_parallel(ranks).with_(kind="fsdp2", reshard=sharding.reshard is not False, offload=sharding.offload)


class FromReplica:
    """``Parallel.apply``: a model is divided that DistributedDataParallel has held before, with its buckets.

    It travels between processes without the layout: what has been traced is not traced there again.
    """

    def __init__(self, layout: Parallel, ddp_options: Mapping[str, Any]) -> None:
        self._layout = layout
        self._options = ddp_options

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, model: nn.Module, mesh: Any) -> nn.Module:
        """The divided model."""
        replica: Any = nn.parallel.DistributedDataParallel(model, device_mesh=mesh, **self._options)
        del replica
        gc.collect()  # its buckets
        return install(model, self._layout, mesh)


def why_not(module: nn.Module, ddp_options: Mapping[str, Any], *, accumulates: bool) -> str:
    """The reason why a model under DistributedDataParallel cannot be divided instead ("" where it can).

    Args:
        module: as the user made it.
        ddp_options: of DistributedDataParallel.
        accumulates: whether gradients of several loaded batches are added up.
    """
    for name in ("find_unused_parameters", "static_graph"):
        if ddp_options.get(name):
            return _("ranks may leave out different parameters under DistributedDataParallel({name}=True)", name=name)
    if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        return _("DDP is set to ignore some parameters")
    if any(getattr(part, "sparse", False) and hasattr(part, "embedding_dim") for part in module.modules()):
        return _("sparse gradients of an embedding are averaged by DDP alone")
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    others = [name for name, _buffer in module.named_buffers() if name.rpartition(".")[2] not in statistics]
    if accumulates and others:
        return _(
            "buffer {name} is sent to the ranks once for several accumulated batches under DistributedDataParallel, "
            "and would be sent with each of them",
            name=others[0],
        )
    return ""


def why_not_optimizer(classes: set[str]) -> str:
    """The reason why an optimizer of these classes cannot update divided weights alike ("" where it can).

    Args:
        classes: names of its class and of those that it inherits from.
    """
    others = classes - {*ELEMENTWISE, "Optimizer", "object"}
    if not others:
        return ""
    return _("{name} is not known to update each number of a weight by itself", name=min(others))


class Divided(nn.Module):
    """In place of the wrapper: whatever it is called with goes to the module, whose weights FSDP2 divides."""

    def __init__(self, module: nn.Module, *, send_buffers: bool) -> None:
        super().__init__()
        self.module = module
        self._send_buffers = send_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with the first rank's buffers."""
        if self._send_buffers:
            self.share_buffers()
        return self.module(*args, **kwargs)

    def share_buffers(self) -> None:
        """The first rank's, on every rank."""
        from torch import distributed as dist

        buffers = list(self.module.buffers())
        if buffers:
            world: Any = dist.group.WORLD
            send: Any = vars(dist)["_broadcast_coalesced"]  # as DDP sends them
            send(world, buffers, _SENT_AT_ONCE, 0)


def divide(
    module: nn.Module, sharding: Sharding, device: torch.device, *, send_buffers: bool = True
) -> tuple[Divided, Callable[[Iterable[torch.optim.Optimizer]], None]]:
    """Divide a model over the processes of the default group, before its optimizer is built.

    Args:
        module: whole, in host memory or on the device; it is changed in place.
        sharding: how.
        device: that this process trains on.
        send_buffers: whether the first rank's buffers are sent to all in every forward.

    Returns:
        The module to call, and a function that puts the whole model, and its optimizers, together in host memory again:
        for all ranks at the same time.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size()
    if ranks > 1:
        as_on_the_first(module, device)
    layout = layout_of(sharding, ranks)
    before = {part: set(vars(part)) for part in module.modules()}
    install(module, layout, make_mesh(layout, device.type))
    stay = keep_parameters_in_place(module) if sharding.offload else None

    def put_together(optimizers: Iterable[torch.optim.Optimizer]) -> None:
        whole: dict[int, nn.Parameter] = {}
        _taken_off(before)
        for part in module.modules():
            for name, parameter in part._parameters.items():  # noqa: SLF001 - where modules keep them
                if parameter is not None:
                    made = whole.get(id(parameter))
                    if made is None:
                        made = nn.Parameter(_gathered(parameter.detach()), requires_grad=parameter.requires_grad)
                        whole[id(parameter)] = made
                    part._parameters[name] = made  # noqa: SLF001 - as above
        for optimizer in optimizers:
            _over(optimizer, whole)
        if stay is not None:
            stay()

    return Divided(module, send_buffers=send_buffers and ranks > 1), put_together


def as_on_the_first(module: nn.Module, device: torch.device) -> None:
    """Give every rank the first one's parameters and buffers, as DistributedDataParallel does when it is made.

    Args:
        module: whole on every rank; its tensors stay where they lie.
        device: of the training, from which they are sent: NCCL sends from nowhere else.
    """
    import torch
    from torch import distributed as dist

    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def _taken_off(before: Mapping[nn.Module, set[str]]) -> None:
    """FSDP2 taken off its modules, which are left with their shards."""
    from torch.distributed import _composable_state

    part: Any
    for part, names in before.items():
        if divided_by_fsdp2(part):
            part.reshard()
            state: Any = part._get_fsdp_state()  # noqa: SLF001 - torch has no way to take FSDP2 off
            handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
            for group in filter(None, groups):
                handles += group._module_to_pre_save_state_dict_hook_handle.values()  # noqa: SLF001
                handles += group._module_to_pre_load_state_dict_hook_handle.values()  # noqa: SLF001
            for handle in handles:
                handle.remove()
            part.__class__ = type(part).__mro__[2]  # after the class that fully_shard made, and FSDPModule
            _composable_state._module_state_mapping.pop(part, None)  # noqa: SLF001
        for name in set(vars(part)) - names:
            if "fsdp" in name.lower() or "composable" in name.lower():
                delattr(part, name)


def whole_state(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """``state_dict()`` with whole tensors in host memory; for all ranks at the same time.

    Args:
        module: divided.
        keep: whether this rank wants it; the others take part and get an empty one.
    """
    return _whole(module.state_dict(), keep=keep)


def whole_optimizer_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """The same of an optimizer: as it would be over whole weights."""
    return _whole(optimizer.state_dict(), keep=keep)


def _whole(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Tensors put together one after the other, so that a rank that keeps none holds one at a time."""
    leaves, spec = pytree.tree_flatten(state)
    made = []
    for leaf in leaves:
        gathered = _gathered(leaf)
        made.append(gathered if keep else None)
    return pytree.tree_unflatten(made, spec) if keep else {}


def load_whole_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state over whole weights, of which this rank keeps its part."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parts = {
        number: {name: _part(value, parameter) for name, value in state["state"].get(number, {}).items()}
        for number, parameter in zip(numbers, own, strict=True)
        if number in state["state"]
    }
    optimizer.load_state_dict({**state, "state": parts})


def _gathered(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value.cpu() if hasattr(value, "cpu") else value
    mesh = value.device_mesh
    if value.device.type != mesh.device_type:  # offloaded: its group talks on the device
        value = DTensor.from_local(
            value.to_local().to(mesh.device_type), mesh, value.placements, shape=value.shape, stride=value.stride()
        )
    return value.full_tensor().cpu()


def _part(value: Any, parameter: Any) -> Any:
    """This rank's part of a state that is as large as the whole parameter."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    mesh, local = parameter.device_mesh, parameter.to_local()
    rows = -(-value.shape[0] // mesh.size())  # as FSDP2 divides it: by rows, the last ranks have less
    mine = value.narrow(0, min(mesh.get_local_rank() * rows, value.shape[0]), local.shape[0])
    mine = mine.to(device=local.device).clone()
    return DTensor.from_local(mine, mesh, parameter.placements, shape=value.shape, stride=parameter.stride())


def _over(optimizer: torch.optim.Optimizer, whole: Mapping[int, nn.Parameter]) -> None:
    """The optimizer over whole weights, with whole states."""
    for group in optimizer.param_groups:
        for at, old in enumerate(group["params"]):
            new = whole.get(id(old))
            if new is None:
                continue
            group["params"][at] = new
            if old in optimizer.state:
                optimizer.state[new] = pytree.tree_map(_gathered, optimizer.state.pop(old))
