"""Puts a decision into a Trainer whose strategy is not set up yet; what remains to be done follows once it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.parallel.resharding import set_resharding
from vram_guard.techniques import Recipe, install
from vram_guard.techniques.optimizers import repoint
from vram_guard.techniques.placement import optimizer_for, place, step_where
from vram_guard_lightning import _closure, _deepspeed, _dividing, _growth, _layouts, _namespaces
from vram_guard_lightning._precision import plugin

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.guard.applied import Applied
    from vram_guard.guard.decision import Decision
    from vram_guard.techniques.loss_graphs import LossGraphs


def before_setup(
    trainer: Trainer, decision: Decision, loss_weight: LossWeight, graphs: LossGraphs | None, applied: Applied
) -> None:
    """Micro-batches, precision, where weights lie, and batch size of the decision's plan."""
    plan = decision.plan
    if _deepspeed.used(trainer):
        applied.notes += _deepspeed.notes(plan)
    if plan.recipe.sharding is not None:
        for name, value in _layouts.changed_settings(trainer, plan.recipe.sharding).items():
            applied.replace(trainer.strategy, name, value)
        if plan.recipe.sharding.fsdp2:
            _dividing.install(trainer, plan.recipe.sharding, applied)
        elif plan.recipe.sharding.offload:
            _layouts.leave_on_host(trainer, applied)
    if decision.splitter is not None:
        divided = plan.recipe.sharding is not None
        applied.callback(_closure.install(trainer, decision.splitter, loss_weight, graphs, divided=divided))
    if plan.precision != plan.precision_before:
        _set_precision(trainer, plan.precision, applied)
    applied.callback(place(trainer.lightning_module, plan.recipe, trainer.strategy.root_device, plan.precision))
    if not _layouts.whole(trainer):  # FSDP's modules go around those that are checkpointed
        applied.callback(install(trainer.lightning_module, plan.recipe))
    if plan.batch_size != plan.batch_size_before:
        _growth.install(trainer, plan.batch_size_before, plan.batch_size, applied)


def after_setup(trainer: Trainer, recipe: Recipe, applied: Applied) -> None:
    """Install the techniques on the model, which is on its device, and on the optimizer, which is made."""
    strategy: Any = trainer.strategy
    if recipe.sharding is not None and recipe.sharding.reshard is not None and not recipe.sharding.fsdp2:
        set_resharding(strategy.model, recipe.sharding.reshard)
    if _layouts.whole(trainer):
        applied.callback(install(trainer.lightning_module, recipe))
    made = [optimizer_for(optimizer, recipe) for optimizer in strategy.optimizers]
    for old, new in zip(strategy.optimizers, made, strict=True):
        for config in strategy.lr_scheduler_configs:
            if new is not old and config.scheduler.optimizer is old:
                repoint(config.scheduler, new)
    strategy.optimizers = made  # Lightning wraps them anew for the user's hooks
    applied.callback(step_where(made, recipe))


def _set_precision(trainer: Trainer, precision: str, applied: Applied) -> None:
    """Lightning's own plugin, for the device that really trains."""
    strategy, namespace = trainer.strategy, _namespaces.of(trainer)
    device = strategy.root_device.type
    if device == "cpu" and precision == "16-mixed":
        # As Trainer(accelerator="cpu", precision="16-mixed") does: its float16 is not for CPUs.
        precision = "bf16-mixed"
        applied.notes.append(_("this training runs on the CPU, where Lightning lets bf16-mixed stand in for 16-mixed"))
    applied.replace(strategy, "precision_plugin", plugin(namespace, precision, device))
