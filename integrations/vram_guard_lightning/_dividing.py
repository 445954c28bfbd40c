"""FSDP2 in place of DistributedDataParallel in a Trainer whose strategy is not set up yet.

What is replaced, each on the strategy and given back at the end: moving the model to its device (it is divided first),
wrapping it, and what checkpoints hold of the model and the optimizer: whole tensors, as under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.parallel import in_place_of_ddp
from vram_guard_lightning import _namespaces, private_api

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.guard.applied import Applied
    from vram_guard.techniques import Sharding

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: Callbacks of Lightning's own that copy the module or its weights.
_COPYING = ("callbacks.StochasticWeightAveraging", "callbacks.weight_averaging.WeightAveraging")


def why_not(trainer: Trainer, module: LightningModule) -> str:
    """The reason why the model cannot be divided by FSDP2 in place of DistributedDataParallel ("" where it can)."""
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return _("there is one process")
    if not _namespaces.is_a(strategy, "strategies.DDPStrategy"):
        return _("the model is divided by {strategy} already", strategy=type(strategy).__name__)
    if missing := private_api.missing(_namespaces.of(trainer), private_api.DIVIDING):
        return _("this release of Lightning is not supported: {what}", what=missing[0])
    if not module.automatic_optimization:
        return _("manual optimization does its own backward and steps")
    if strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None:
        return _("a DDP communication hook averages the gradients in its own way")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(_namespaces.is_a(callback, path) for path in _COPYING):
            return _("{name} copies whole weights", name=type(callback).__name__)
    return in_place_of_ddp.why_not(module, strategy._ddp_kwargs, accumulates=trainer.accumulate_grad_batches > 1)


def offloads(trainer: Trainer) -> bool:
    """True if weights may lie in host memory as well: NCCL, which would add up norms there, is not asked to."""
    return not trainer.gradient_clip_val or trainer.strategy.root_device.type == "cpu"


def install(trainer: Trainer, sharding: Sharding, applied: Applied) -> None:
    """Divide the model when the strategy moves it.

    Args:
        trainer: the Trainer.
        sharding: how.
        applied: what is undone at the end.
    """
    strategy: Any = trainer.strategy
    options: Mapping[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    buffers = options.get("forward_sync_buffers", options.get("broadcast_buffers"))
    to_device, teardown = strategy.model_to_device, strategy.teardown
    together: list[Any] = []

    def model_to_device() -> None:
        if together:
            to_device()
            return
        module = strategy.model
        made, put_together = in_place_of_ddp.divide(
            module, sharding, strategy.root_device, send_buffers=buffers is not False
        )
        together.append(put_together)
        to_device()
        strategy.model = made

    def torn_down() -> None:
        for put_together in together:
            put_together(getattr(one, "optimizer", one) for one in strategy.optimizers)
        strategy.model = strategy.lightning_module
        teardown()

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False):
            in_place_of_ddp.load_whole_optimizer_state(getattr(optimizer, "optimizer", optimizer), state)

    def module_state() -> dict[str, Any]:
        return in_place_of_ddp.whole_state(strategy.lightning_module, keep=trainer.is_global_zero)

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        inner = getattr(optimizer, "optimizer", optimizer)
        return in_place_of_ddp.whole_optimizer_state(inner, keep=trainer.is_global_zero)

    replacements: dict[str, Any] = {
        "model_to_device": model_to_device,
        "configure_ddp": lambda: None,
        "teardown": torn_down,
        "load_optimizer_state_dict": load_optimizer_state_dict,
        "lightning_module_state_dict": module_state,
        "optimizer_state": optimizer_state,
    }
    for name, method in replacements.items():
        applied.replace(strategy, name, method)
