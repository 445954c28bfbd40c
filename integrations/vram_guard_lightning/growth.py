"""A larger batch from the user's own loader, and the learning rates that go with it.

The loader that the user's hook returns gets another batch size in place, every time it is asked for. Whatever
Lightning does to it afterwards (a DistributedSampler, seeding of workers) starts from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from vram_guard.capture.loader import set_batch_size
from vram_guard_lightning import namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here stands in private_api.py

#: Trainer settings that count batches when they are ints: kept at the same number of samples.
COUNTED_IN_BATCHES = ("val_check_interval", "limit_train_batches")


def why_not(trainer: Trainer, growable: str) -> str:
    """Why the batch of this training cannot be grown; "" where it can.

    Args:
        trainer: the Trainer.
        growable: what the loader itself says (:attr:`vram_guard_lightning.sample.Sample.growable`).
    """
    if growable:
        return growable
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return "fast_dev_run is on"
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        return "overfit_batches is set: the same few batches are meant to be seen again and again"
    return ""


def install(trainer: Trainer, before: int, after: int) -> tuple[Callable[[], None], list[str]]:
    """Deliver batches of ``after`` samples instead of ``before``.

    Returns:
        The function that undoes it, and what else was changed, in words.
    """
    source: Any = trainer.fit_loop._data_source
    handed_out = source.dataloader
    resized: list[tuple[Any, int]] = []

    def dataloader() -> Any:
        loaders = handed_out()
        for loader in _loaders(loaders):
            if loader.batch_size == before:
                resized.append((loader, before))
                set_batch_size(loader, after)
        return loaders

    source.dataloader = dataloader
    counters, words = _recount(trainer, after // before)

    def undo() -> None:
        vars(source).pop("dataloader", None)
        for loader, size in resized:
            set_batch_size(loader, size)
        for name, value in counters.items():
            setattr(trainer, name, value)

    return undo, words


def _loaders(loaders: Any) -> list[Any]:
    leaves = pytree.tree_leaves(namespaces.loader_tree(loaders), is_leaf=lambda leaf: isinstance(leaf, DataLoader))
    return [leaf for leaf in leaves if isinstance(leaf, DataLoader)]


def _recount(trainer: Trainer, factor: int) -> tuple[dict[str, Any], list[str]]:
    """Settings in batches become settings in larger batches; the old values, and what changed in words."""
    old: dict[str, Any] = {}
    words = []
    for name in COUNTED_IN_BATCHES:
        value = getattr(trainer, name)
        if type(value) is int and value > 1:
            old[name] = value
            setattr(trainer, name, max(1, value // factor))
            words.append(f"{name} counts larger batches: {value} -> {getattr(trainer, name)}")
    if trainer.max_steps != -1:
        words.append(f"max_steps stays {trainer.max_steps}: steps of {factor} times as many samples")
    return old, words


def scale_learning_rates(trainer: Trainer, factor: float) -> tuple[str, ...]:
    """Multiply every learning rate of this training; what could not be scaled, in words."""
    from vram_guard.apply.learning_rate import scale_learning_rates as scale

    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    left_out: list[str] = []
    for optimizer in trainer.optimizers:
        own = [made for made in schedulers if getattr(made, "optimizer", optimizer) is optimizer]
        left_out += scale(optimizer, own, factor)
    return tuple(left_out)
