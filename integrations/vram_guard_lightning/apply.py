"""Puts a decision into a Trainer whose strategy is not set up yet, and takes it out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard_lightning import closure, growth, namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard_lightning.closure import LossWeight
    from vram_guard_lightning.decide import Decision


@dataclass
class Applied:
    """What was changed in a Trainer, and how to change it back."""

    notes: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def on_undo(self, action: Callable[[], None]) -> None:
        """``action`` is called by :meth:`undo`, the latest first."""
        self._undo.append(action)

    def undo(self) -> None:
        """The Trainer is as the user made it; calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def apply(trainer: Trainer, decision: Decision, loss_weight: LossWeight = "mean") -> Applied:
    """Precision, micro-batches and batch size of the decision's plan. Learning rates are scaled later."""
    applied, plan = Applied(), decision.plan
    if plan.precision != plan.precision_before:
        _set_precision(trainer, plan.precision, applied)
    if decision.splitter is not None:
        applied.on_undo(closure.install(trainer, decision.splitter, loss_weight))
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
