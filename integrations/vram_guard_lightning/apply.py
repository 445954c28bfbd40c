"""Puts a decision into a Trainer whose strategy is not set up yet, and takes it out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.techniques import install
from vram_guard.techniques.optimizers import repoint
from vram_guard.techniques.placement import optimizer_for, place
from vram_guard_lightning import closure, growth, namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.techniques import Recipe
    from vram_guard_lightning.decide import Decision


@dataclass
class Applied:
    """What was changed in a Trainer, and how to change it back."""

    notes: list[str] = field(default_factory=list)
    after_setup: list[Callable[[], None]] = field(default_factory=list)
    """What is left to do once the strategy is set up."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def on_undo(self, action: Callable[[], None]) -> None:
        """``action`` is called by :meth:`undo`, the latest first."""
        self._undo.append(action)

    def finish(self) -> None:
        """What is left, once the strategy has moved the model and made the optimizer."""
        for action in self.after_setup:
            action()

    def undo(self) -> None:
        """The Trainer is as the user made it; calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def apply(trainer: Trainer, decision: Decision, loss_weight: LossWeight = "mean") -> Applied:
    """Precision, micro-batches, techniques and batch size of the decision's plan. Learning rates are scaled later."""
    applied, plan = Applied(), decision.plan
    if plan.precision != plan.precision_before:
        _set_precision(trainer, plan.precision, applied)
    if decision.splitter is not None:
        applied.on_undo(closure.install(trainer, decision.splitter, loss_weight))
    if plan.recipe:
        recipe = plan.recipe
        applied.on_undo(place(trainer.lightning_module, recipe, trainer.strategy.root_device, plan.precision))
        applied.after_setup.append(lambda: _follow(trainer, recipe, applied))
    if plan.batch_size != plan.batch_size_before:
        undo, words = growth.install(trainer, plan.batch_size_before, plan.batch_size)
        applied.on_undo(undo)
        applied.notes += words
    return applied


def _set_precision(trainer: Trainer, precision: str, applied: Applied) -> None:
    """Lightning's own mixed precision plugin, for the device that really trains."""
    strategy = trainer.strategy
    device = strategy.root_device.type
    if device == "cpu" and precision == "16-mixed":
        # As Trainer(accelerator="cpu", precision="16-mixed") does: its float16 is not for CPUs.
        precision = "bf16-mixed"
        applied.notes.append("this training runs on the CPU, where Lightning lets bf16-mixed stand in for 16-mixed")
    make = namespaces.part(namespaces.of(trainer), "plugins.precision.MixedPrecision")
    before = strategy.precision_plugin
    strategy.precision_plugin = make(precision, device)

    def undo() -> None:
        strategy.precision_plugin = before

    applied.on_undo(undo)


def _follow(trainer: Trainer, recipe: Recipe, applied: Applied) -> None:
    """Install the techniques on the model, which is on its device, and on the optimizer, which is made."""
    strategy = trainer.strategy
    applied.on_undo(install(trainer.lightning_module, recipe))
    made = [optimizer_for(optimizer, recipe) for optimizer in strategy.optimizers]
    for old, new in zip(strategy.optimizers, made, strict=True):
        for config in strategy.lr_scheduler_configs:
            if new is not old and config.scheduler.optimizer is old:
                repoint(config.scheduler, new)
    strategy.optimizers = made  # Lightning wraps them anew for the user's hooks
