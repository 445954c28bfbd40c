"""Recovers from a real out-of-memory error inside Lightning's loops, in one process; see :mod:`._closure`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard_lightning import _hooks, _namespaces, private_api
from vram_guard_lightning._closure import replace_closures

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.guard.guard import Guard

#: Packages whose objects a module holds without their being its state: its Trainer, loggers, hyperparameters.
FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")

#: Hooks that Lightning calls once for a batch, between its forward and its backward.
FREEING = ("on_before_zero_grad", "optimizer_zero_grad")


def why_not(trainer: Trainer, module: LightningModule) -> str:
    """The reason why this training cannot recover from an out-of-memory error; "" where it can."""
    strategy: Any = trainer.strategy
    if not module.automatic_optimization:
        return _("manual optimization does its own backward and steps")
    if missing := private_api.missing(_namespaces.of(trainer), private_api.MICRO_BATCHES):
        return _("this release of Lightning is not supported: {missing}", missing=missing[0])
    if why := _hooks.why_whole(trainer, module):
        return why
    if not _namespaces.is_a(strategy, "strategies.SingleDeviceStrategy"):
        return _("repeating a step under {strategy} is not known to be safe", strategy=type(strategy).__name__)
    if _hooks.overridden(trainer, module, FREEING):
        return _("{hooks} run once for a batch, in the middle of what would be repeated", hooks=", ".join(FREEING))
    return ""


def arm(trainer: Trainer, module: LightningModule, guard: Guard) -> None:
    """Arm a Trainer whose strategy is set up."""
    why_whole = functools.partial(_hooks.why_whole, trainer, module)
    guard.recover(functools.partial(replace_closures, trainer), module, why_whole, *FRAMEWORKS)
