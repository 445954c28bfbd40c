"""A larger batch from the user's own loader, and the learning rates that go with it.

The loader that the user's hook returns gets another batch size in place, every time it is asked for. Whatever
Lightning does to it afterwards (a DistributedSampler, seeding of workers) starts from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from vram_guard.apply import learning_rate, step_counts
from vram_guard.apply.saved_rates import divided_optimizer, divided_schedulers
from vram_guard.capture.loader import set_batch_size
from vram_guard.language import _
from vram_guard_lightning import _namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.guard.applied import Applied

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: Trainer settings that count batches when they are ints: kept at the nearest number of samples. Validation is sooner
#: rather than later: Lightning refuses an interval that is longer than the epoch.
COUNTED_IN_BATCHES: dict[str, Callable[[float], int]] = {
    "val_check_interval": math.floor,
    "limit_train_batches": round,
    "log_every_n_steps": round,
}


def why_not(trainer: Trainer, growable: str) -> str:
    """The reason why the batch of this training cannot be grown; "" where it can.

    Args:
        trainer: the Trainer.
        growable: what the loader itself says (:attr:`vram_guard.capture.loader.Sample.growable`).
    """
    if growable:
        return growable
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return _("fast_dev_run is on")
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        return _("overfit_batches is set: training repeats the same few batches on purpose")
    return ""


def install(trainer: Trainer, before: int, after: int, applied: Applied) -> None:
    """Deliver batches of ``after`` samples instead of ``before``."""
    source: Any = trainer.fit_loop._data_source
    handed_out = source.dataloader

    def dataloader() -> Any:
        loaders = handed_out()
        for loader in _loaders(loaders):
            if loader.batch_size == before:
                applied.callback(set_batch_size, loader, before)
                set_batch_size(loader, after)
        return loaders

    applied.replace(source, "dataloader", dataloader)
    _recount(trainer, after // before, applied)


def _loaders(loaders: Any) -> list[Any]:
    leaves = pytree.tree_leaves(_namespaces.loader_tree(loaders), is_leaf=lambda leaf: isinstance(leaf, DataLoader))
    return [leaf for leaf in leaves if isinstance(leaf, DataLoader)]


def _recount(trainer: Trainer, factor: int, applied: Applied) -> None:
    """Settings in batches become settings in larger batches."""
    for name, rounded in COUNTED_IN_BATCHES.items():
        value = getattr(trainer, name)
        if type(value) is int and value > 1:
            fewer = max(1, rounded(value / factor))
            applied.replace(trainer, name, fewer)
            note = _("{name} counts larger batches: {before} -> {after}", name=name, before=value, after=fewer)
            if fewer * factor != value:
                note += _(" (the nearest: {share} of as many samples)", share=f"{fewer * factor / value:.0%}")
            applied.notes.append(note)
    if trainer.max_steps != -1:
        applied.notes.append(
            _(
                "max_steps stays {steps}: steps of {factor} times as many samples",
                steps=trainer.max_steps,
                factor=factor,
            )
        )
    counted = list(step_counts.of_callbacks(trainer.callbacks))  # type: ignore[attr-defined]
    if trainer.min_steps:
        counted.insert(0, f"min_steps = {trainer.min_steps}")
    if counted:
        applied.notes.append(
            _("counted in steps of {factor} times as many samples: {counts}", factor=factor, counts=", ".join(counted))
        )


def schedule_notes(trainer: Trainer, restored_size: int | None, size: int, written_size: int) -> Iterator[str]:
    """Remarks on schedules that count optimizer steps, once they are built and a checkpoint is restored.

    Args:
        trainer: whose training starts.
        restored_size: samples of a batch in the run that saved the checkpoint; None: nothing was restored.
        size: samples of a batch now.
        written_size: as the training is written.
    """
    stepwise = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if not stepwise:
        return
    counts = ", ".join(step_counts.of_schedulers(stepwise))
    if size != written_size:
        yield _(
            "schedules count steps of {factor} times as many samples: {counts}; numbers that were computed from "
            "trainer.estimated_stepping_batches follow the larger batch, numbers that were written down do not",
            factor=size // written_size,
            counts=counts,
        )
    if restored_size not in (None, size):
        yield _(
            "the checkpoint is of a run with batches of {before} samples, this one has {now}: schedules go on with the "
            "number of steps that they were made for ({counts})",
            before=restored_size,
            now=size,
            counts=counts,
        )


def scale_learning_rates(trainer: Trainer, factor: float) -> tuple[str, ...]:
    """Multiply every learning rate of this training; what could not be scaled, in words."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    left_out: list[str] = []
    for optimizer in trainer.optimizers:
        own = [made for made in schedulers if getattr(made, "optimizer", optimizer) is optimizer]
        left_out += learning_rate.scale_learning_rates(optimizer, own, factor)
    return tuple(left_out)


def save_as_written(trainer: Trainer, checkpoint: dict[str, Any], factor: float) -> bool:
    """Divide the learning rates that a checkpoint is about to hold; False where a scheduler's cannot be found in it."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    states = divided_schedulers(schedulers, checkpoint["lr_schedulers"], factor)
    if states is None:
        return False
    checkpoint["lr_schedulers"] = states
    checkpoint["optimizer_states"] = [divided_optimizer(one, factor) for one in checkpoint["optimizer_states"]]
    return True
