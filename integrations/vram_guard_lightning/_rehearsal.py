"""One optimizer step of a Trainer, run for real on the CPU in a copy of its process, through Lightning's own loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.parallel.resharding import offloaded_where_unsaid
from vram_guard.proof.rehearsal import Rehearsal, Rehearsed, RehearsedStep, SteppedSignal
from vram_guard.simulate.parallel.groups import alone
from vram_guard.techniques import place
from vram_guard_lightning import _apply, _closure, _dividing, _namespaces
from vram_guard_lightning._layouts import configured_alone, shards_in_configure_model

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torchmetrics import Metric

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: Callbacks of Lightning's own that watch, report or save: what they do is no part of a step.
WATCHING = (
    "callbacks.Checkpoint",
    "callbacks.EarlyStopping",
    "callbacks.ProgressBar",
    "callbacks.Timer",
    "callbacks.LearningRateMonitor",
    "callbacks.LearningRateFinder",
    "callbacks.BatchSizeFinder",
    "callbacks.DeviceStatsMonitor",
    "callbacks.ModelSummary",
    "callbacks.throughput_monitor.ThroughputMonitor",
)

#: Hooks that Lightning calls once for a loaded batch or an optimizer step.
COUNTED = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "backward"),
    *("configure_gradient_clipping", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)

#: Those of them that run after training_step.
AFTERWARDS = (
    *("on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_step", "backward", "configure_gradient_clipping", "lr_scheduler_step"),
)


def rehearse(
    trainer: Trainer, module: LightningModule, make_batch: Callable[[int], Any], rehearsal: Rehearsal
) -> Rehearsed:
    """Run the step; what is done to the Trainer is not undone.

    Args:
        trainer: of the copy, whose strategy is not set up yet.
        module: that it trains.
        make_batch: number of samples -> a batch of the user's loader.
        rehearsal: how it is run.

    Raises:
        Exception: whatever the user's code or Lightning raises.
    """
    namespace = _namespaces.of(trainer)
    closed = tuple(_namespaces.part(namespace, path) for path in ("trainer.trainer.Trainer", "callbacks.Callback"))
    from torchmetrics import Metric  # it comes with Lightning, whose absence has its own message

    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    step = RehearsedStep(module, rehearsal, closed=(*closed, Metric), read=read_afterwards(trainer, module))
    divided = shards_in_configure_model(trainer)
    on_cpu(trainer, module, double=rehearsal.double)
    quiet(trainer)
    _count_logging(step, trainer)
    batch = make_batch(rehearsal.samples)
    loop: Any = trainer.fit_loop
    loop._data_source = type(loop._data_source)(_RepeatedBatch(batch), "")
    loop._combined_loader = None
    trainer.accumulate_grad_batches = min(trainer.accumulate_grad_batches, ROUNDS_FOLLOWED)
    trainer.callbacks.append(_callback(namespace, step))  # type: ignore[attr-defined]
    if rehearsal.splitter is not None:
        step.applied.callback(_closure.install(trainer, rehearsal.splitter, step.rehearsal.loss_weight))
    strategy: Any = trainer.strategy
    sharding = rehearsal.recipe.sharding
    if sharding is not None and sharding.fsdp2:
        step.enter_context(alone())
        _dividing.install(trainer, sharding, step.applied, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    if divided:
        if sharding is not None and sharding.offload:
            step.enter_context(offloaded_where_unsaid("cpu"))
        step.enter_context(configured_alone(trainer, module))
    step.applied.callback(place(module, rehearsal.recipe, "cpu"))
    strategy.setup(trainer)
    _apply.after_setup(trainer, rehearsal.recipe, step.applied)
    step.follow(getattr(optimizer, "optimizer", optimizer) for optimizer in strategy.optimizers)
    _count(step, trainer, module)
    step.mark_forwards(module, "training_step")
    call: Any = import_module(f"{namespace.__name__}.trainer.call")
    call._call_callback_hooks(trainer, "on_fit_start")
    call._call_lightning_module_hook(trainer, "on_fit_start")
    try:
        step.begin()
        loop.run()
    except SteppedSignal:
        return step.result(logged={**trainer.callback_metrics, **_computed(metrics)})
    raise UnsupportedStepError(_("the loop ended before an optimizer step"))


def _computed(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """The values of metrics: their states may be lists of what each micro-batch brought."""
    values = {}
    for name, metric in metrics.items():
        for at, leaf in enumerate(pytree.tree_leaves(metric.compute())):
            values[f"{name}.compute()[{at}]"] = leaf
    return values


def _count_logging(step: RehearsedStep, trainer: Trainer) -> None:
    """A logger that writes nothing, in place of the training's: the user's own calls of it are counted."""
    if not trainer.loggers:
        return
    silent = _namespaces.part(_namespaces.of(trainer), "loggers.logger.DummyLogger")()
    trainer.loggers = [silent]
    step.count_calls(silent, ("log_metrics",), "logger.")
    step.count_calls(silent.experiment, ("log", "add_scalar", "add_scalars", "log_metric"), "logger.experiment.")


class _RepeatedBatch:
    """The same batch for as long as the loop asks for one."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * len(self))

    def __len__(self) -> int:
        return 1000


def on_cpu(trainer: Trainer, module: LightningModule, *, double: bool) -> None:
    """Another strategy, for one process without a GPU."""
    part = functools.partial(_namespaces.part, _namespaces.of(trainer))
    precision = part("plugins.precision.DoublePrecision" if double else "plugins.precision.Precision")()
    accelerator = part("accelerators.CPUAccelerator")()
    strategy = part("strategies.SingleDeviceStrategy")("cpu", accelerator=accelerator, precision_plugin=precision)
    trainer._accelerator_connector.strategy = strategy
    strategy.connect(module)
    strategy.setup_environment()


def quiet(trainer: Trainer) -> None:
    """Nothing is validated, saved, shown or written down."""
    trainer.callbacks = [  # type: ignore[attr-defined]
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not any(_namespaces.is_a(callback, path) for path in WATCHING)
        and type(callback).__module__.partition(".")[0] != "vram_guard_lightning"
    ]
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0


def _callback(namespace: Any, step: RehearsedStep) -> Any:
    """A callback of the Trainer's own namespace that ends the run when a batch's other hooks have run."""
    hooks = {"on_train_batch_end": lambda _self, *_args, **_kwargs: step.end_if_stepped()}
    return type("StopAfterStep", (namespace.Callback,), hooks)()


def _count(step: RehearsedStep, trainer: Trainer, module: LightningModule) -> None:
    """The hooks that user code has overridden."""
    for owner, names in _overridden(trainer, module):
        step.count_calls(owner, names, "" if owner is module else f"{type(owner).__name__}.")


def read_afterwards(trainer: Trainer, module: LightningModule) -> bool:
    """True if user code runs after training_step, in hooks that may read what it has left."""
    return any(set(names) & set(AFTERWARDS) for _owner, names in _overridden(trainer, module))


def _overridden(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Any, list[str]]]:
    owners = [module, *trainer.callbacks, *([trainer.datamodule] if trainer.datamodule is not None else [])]  # type: ignore[attr-defined]
    for owner in owners:
        kind = type(owner)
        if kind.__module__.partition(".")[0] != "vram_guard_lightning":
            yield owner, [name for name in COUNTED if hasattr(kind, name) and not _namespaces.is_lightnings(kind, name)]
