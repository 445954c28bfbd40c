"""How a Trainer's strategy spreads a model over its processes, in a form that a trace runs on a pretended rank.

What is put on the model is Lightning's own code: the strategy's, and the user's ``configure_model``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.capture.simulated_device import move_to_simulated_device
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.parallel import deepspeed
from vram_guard.parallel.resharding import offloaded_where_unsaid, other_strategy, resharding_of, set_resharding
from vram_guard.parallel.resharding import why_not_offloaded as why_not_flat_offloaded
from vram_guard.parallel.spec import Parallel
from vram_guard.patching import replaced
from vram_guard.techniques import Sharding
from vram_guard.techniques.host_modules import keep_parameters_in_place
from vram_guard_lightning import _deepspeed, _namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn

    from vram_guard.guard.applied import Applied

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: Strategies under which each process holds the whole model and nothing is moved behind the scenes.
WHOLE = ("strategies.SingleDeviceStrategy", "strategies.DDPStrategy")
#: FullyShardedDataParallel, and FSDP2 with tensor parallelism as the user's ``configure_model`` has it.
FSDP, MODEL_PARALLEL = "strategies.FSDPStrategy", "strategies.ModelParallelStrategy"

#: Of ModelParallelStrategy's mesh.
DIMENSIONS = ("data_parallel", "tensor_parallel")

#: No change of how a strategy divides its model.
AS_WRITTEN = Sharding()

#: Arguments of FullyShardedDataParallel that hold tensors or processes of the real training.
_REAL = ("process_group", "ignored_parameters", "ignored_states")


def layout_of(trainer: Trainer) -> Parallel | None:
    """The layout that a strategy puts on its model; None where every process holds the whole of it.

    Raises:
        UnsupportedStepError: it cannot be followed.
    """
    strategy: Any = trainer.strategy
    if whole(trainer):
        return None
    sharded, parallel = (_namespaces.is_a(strategy, path) for path in (FSDP, MODEL_PARALLEL))
    if not (sharded or parallel):
        raise UnsupportedStepError(
            _(
                "the strategy {kind} shards or moves the model; the guard supports one device, DDP, FSDPStrategy, "
                "ModelParallelStrategy and DeepSpeedStrategy (strategy='auto', 'ddp', 'fsdp', 'deepspeed')",
                kind=type(strategy).__name__,
            )
        )
    given = [name for name in _REAL if strategy.kwargs.get(name) is not None] if sharded else []
    if given:
        raise UnsupportedStepError(
            _("FSDPStrategy({setting}=...) belongs to the real processes, and cannot be predicted", setting=given[0])
        )
    tensor = strategy.device_mesh["tensor_parallel"].size() if parallel else 1
    return Parallel(
        gpus=trainer.world_size,
        # Where layers are divided over more than a node has, nodes are no bounds of anything that is predicted here.
        node=trainer.world_size if strategy.num_processes % tensor else strategy.num_processes,
        tensor=tensor,
        reshard=not sharded or other_strategy(strategy.sharding_strategy.name, reshard=True) is None,
        offload=flat_on_host(trainer),
        apply=StrategyLayout(trainer, _fully_sharded if sharded else _model_parallel),
    )


def flat_on_host(trainer: Trainer) -> bool:
    """True if FSDPStrategy keeps parameters, gradients and optimizer states in host memory as it is written."""
    strategy: Any = trainer.strategy
    return _namespaces.is_a(strategy, FSDP) and bool(strategy.cpu_offload.offload_params)


def whole(trainer: Trainer) -> bool:
    """True if every process holds the whole model."""
    return any(_namespaces.is_a(trainer.strategy, path) for path in WHOLE) and not _deepspeed.used(trainer)


def shards_in_configure_model(trainer: Trainer) -> bool:
    """True if the strategy lets ``configure_model`` divide the model, which has to be captured before that."""
    divides = any(_namespaces.is_a(trainer.strategy, path) for path in (FSDP, MODEL_PARALLEL))
    module: Any = trainer.lightning_module
    return divides and not all(
        _namespaces.is_lightnings(module, hook) for hook in ("configure_model", "configure_sharded_model")
    )


def installable(trainer: Trainer) -> tuple[str, ...]:
    """Techniques that can be put on the model's blocks before the strategy divides it."""
    if _deepspeed.used(trainer):
        return ("checkpoint", "offload_optimizer")
    own = getattr(trainer.strategy, "_activation_checkpointing_kwargs", None)
    return (*(() if own else ("checkpoint",)), *(() if why_not_offloaded(trainer) else ("offload_parameters",)))


def data_ranks(trainer: Trainer) -> int:
    """Processes that see different data: ranks of tensor parallelism share theirs."""
    return int(getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1))


class StrategyLayout:
    """``Parallel.apply``: what Lightning does to a model before it makes the optimizer.

    It travels between processes without its Trainer: what has been traced is not traced there again.
    """

    def __init__(
        self, trainer: Trainer, put: Callable[[Any, nn.Module], nn.Module], sharding: Sharding = AS_WRITTEN
    ) -> None:
        self._trainer = trainer
        self._put = put
        self._sharding = sharding
        self.reshards: frozenset[bool] = frozenset()
        """As FSDP2 was set in the latest trace, see :func:`vram_guard.parallel.resharding.resharding_of`."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, model: nn.Module, _mesh: Any) -> nn.Module:
        """The module that training_step is called through."""
        trainer: Any = self._trainer
        with _on_simulated_gpu(trainer.strategy), changed(trainer, self._sharding):
            made = self._put(trainer, model)
            self.reshards = resharding_of(made)
            if self._sharding.reshard is not None:
                set_resharding(made, self._sharding.reshard)
            move_to_simulated_device(made)
        trainer.strategy.model = made  # for self.trainer.model in configure_optimizers
        return made

    def with_(self, sharding: Sharding) -> StrategyLayout:
        """The same under a change of it."""
        return StrategyLayout(self._trainer, self._put, sharding)


def shardings_of(trainer: Trainer, layout: Parallel) -> Callable[[], Mapping[Sharding, Parallel]]:
    """Other ways in which the strategy can divide the model, by its own options; to be asked after the first trace."""
    written: Any = layout.apply

    def shardings() -> dict[Sharding, Parallel]:
        times = _other_times(trainer, written)
        ways = [Sharding(reshard=reshard) for reshard in times]
        if not why_not_offloaded(trainer):
            ways += [Sharding(reshard=reshard, offload=True) for reshard in (None, *filter(None, times))]
        return {
            one: layout.with_(
                apply=written.with_(one),
                reshard=layout.reshard if one.reshard is None else one.reshard,
                offload=layout.offload or one.offload,
            )
            for one in ways
        }

    return shardings


def _other_times(trainer: Any, written: StrategyLayout) -> tuple[bool, ...]:
    """True: gathered weights can be freed after the forward; False: they can be kept; as written is left out."""
    if not _namespaces.is_a(trainer.strategy, FSDP):
        return tuple(reshard for reshard in (True, False) if written.reshards - {reshard})
    own = trainer.strategy.sharding_strategy.name
    return tuple(reshard for reshard in (True, False) if other_strategy(own, reshard))


def why_not_offloaded(trainer: Trainer) -> str:
    """The reason why weights may not be left in host memory by the strategy's own means ("" where they may)."""
    if _namespaces.is_a(trainer.strategy, FSDP):
        return why_not_flat_offloaded()
    if trainer.gradient_clip_val and trainer.strategy.root_device.type == "cuda":
        return _("gradients on the host are clipped over gloo, and the strategy has NCCL only")
    return ""


def leave_on_host(trainer: Trainer, applied: Applied) -> None:
    """Let ``configure_model`` leave what it divides in host memory, and Lightning not move it from there."""
    device = trainer.strategy.root_device.type
    applied.enter_context(offloaded_where_unsaid(device))
    applied.callback(keep_parameters_in_place(trainer.lightning_module))
    strategies: Any = import_module(f"{_namespaces.of(trainer).__name__}.strategies.model_parallel")
    own = strategies._materialize_distributed_module

    def materialize(module: nn.Module, _device: torch.device) -> None:
        own(module, torch.device("cpu"))

    applied.replace(strategies, "_materialize_distributed_module", materialize)


@contextlib.contextmanager
def changed(trainer: Trainer, sharding: Sharding) -> Iterator[None]:
    """Inside the block the strategy divides a model under these changes."""
    with contextlib.ExitStack() as stack:
        for name, value in changed_settings(trainer, sharding).items():
            stack.enter_context(replaced(trainer.strategy, {name: value}))
        if sharding.offload:
            stack.enter_context(offloaded_where_unsaid("cuda"))
        yield


def changed_settings(trainer: Trainer, sharding: Sharding) -> dict[str, Any]:
    """Attributes of FSDPStrategy under these changes; none where ``configure_model`` divides the model by FSDP2."""
    strategy: Any = trainer.strategy
    if _deepspeed.used(trainer):
        return {"config": deepspeed.changed(strategy.config, sharding)}
    if not _namespaces.is_a(strategy, FSDP):
        return {}
    settings: dict[str, Any] = {}
    if sharding.reshard is not None:
        own = strategy.sharding_strategy
        settings["sharding_strategy"] = type(own)[other_strategy(own.name, sharding.reshard)]
    return settings


@contextlib.contextmanager
def _on_simulated_gpu(strategy: Any) -> Iterator[None]:
    """The strategy's own device is the simulated one, whatever this machine has."""
    devices = [torch.device("cuda", 0)] * len(strategy.parallel_devices)
    with replaced(strategy, {"parallel_devices": devices}):
        yield


def _fully_sharded(trainer: Any, model: nn.Module) -> nn.Module:
    """``FSDPStrategy``: configure_model, which may have wrapped parts, and then the strategy's own policy."""
    strategy = trainer.strategy
    settings = dict(strategy.kwargs)  # the strategy deletes from them
    if "HYBRID" in strategy.sharding_strategy.name:
        settings["device_mesh"] = _hybrid_mesh(strategy)
    with replaced(strategy, {"kwargs": settings}):
        _configured(trainer)
        if not _namespaces.is_lightnings(trainer.lightning_module, "configure_sharded_model"):
            return model
        made: nn.Module = strategy._setup_model(model)
    return made


def _hybrid_mesh(strategy: Any) -> Any:
    """Replicas and shards of HYBRID_SHARD among the pretended ranks; without a mesh of the user's: shards in a node."""
    from torch.distributed.device_mesh import init_device_mesh

    given = strategy.kwargs.get("device_mesh")
    shape = (strategy.num_nodes, strategy.num_processes)
    if given is not None:
        shape = tuple(given if isinstance(given, tuple) else given.mesh.shape)
    return init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))


def _model_parallel(trainer: Any, model: nn.Module) -> nn.Module:
    """``ModelParallelStrategy``: configure_model with a mesh of pretended ranks; the trace moves what it left."""
    from torch.distributed.device_mesh import init_device_mesh

    strategy = trainer.strategy
    mesh = init_device_mesh("cuda", tuple(strategy.device_mesh.mesh.shape), mesh_dim_names=DIMENSIONS)
    with replaced(strategy, {"_device_mesh": mesh}):
        vars(model)["_device_mesh"] = mesh
        _configured(trainer)
    return model


def _configured(trainer: Any) -> None:
    """Lightning's call of configure_model, in its contexts."""
    call: Any = import_module(f"{_namespaces.of(trainer).__name__}.trainer.call")
    call._call_configure_model(trainer)
