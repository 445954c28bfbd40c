"""A plan's techniques on what Accelerate has prepared: the same functions for the dry run and for the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.apply.sliced_forward import slice_forward

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.techniques import Recipe

# ruff: noqa: SLF001 - every private name of Accelerate used here is listed in private_api.py


def set_precision(accelerator: Any, precision: str) -> None:
    """Mixed precision for what is prepared already, as ``Accelerator(mixed_precision=...)`` would have had it.

    Args:
        accelerator: the script's.
        precision: "fp16" or "bf16".
    """
    from accelerate.accelerator import convert_outputs_to_fp32, get_mixed_precision_context_manager
    from accelerate.optimizer import patch_optimizer_step
    from accelerate.utils import get_grad_scaler

    accelerator.state._mixed_precision = precision
    accelerator.native_amp = True
    for model in accelerator._models:
        autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model._original_forward = model.forward
        if hasattr(model.forward, "__func__"):
            model.forward = MethodType(convert_outputs_to_fp32(autocast(model.forward.__func__)), model)
        else:
            model.forward = convert_outputs_to_fp32(autocast(model.forward))
    if precision != "fp16":
        return
    handler = getattr(accelerator, "scaler_handler", None)
    accelerator.scaler = get_grad_scaler(accelerator.distributed_type, **(handler.to_kwargs() if handler else {}))
    for optimizer in accelerator._optimizers:
        optimizer.scaler = accelerator.scaler
        optimizer._accelerate_step_called = False
        optimizer._optimizer_original_step_method = optimizer.optimizer.step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, optimizer.optimizer.step)


def set_slices(
    accelerator: Any,
    models: list[nn.Module],
    batch_size: int,
    micro_batch_size: int,
    *,
    loss_weight: Literal["mean", "sum"] = "mean",
    returns_loss: bool = True,
    at_most: int | None = None,
    on_slice: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Every trained model works in slices of so many samples; the function that undoes it."""
    undo = [
        slice_forward(
            model,
            batch_size,
            micro_batch_size,
            loss_weight=loss_weight,
            returns_loss=returns_loss,
            scale=_scale_of(accelerator),
            at_most=at_most,
            on_slice=on_slice,
        )
        for model in models
        if any(parameter.requires_grad for parameter in model.parameters())
    ]

    def all_undone() -> None:
        for one in undo:
            one()

    return all_undone


def _scale_of(accelerator: Any) -> Callable[[], float]:
    def scale() -> float:
        scaler = accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    return scale


def set_optimizers(accelerator: Any, recipe: Recipe) -> None:
    """The prepared optimizers in the form that the recipe names (for-loop, fused): in place."""
    from vram_guard.techniques.placement import optimizer_for

    for optimizer in accelerator._optimizers:
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer_for(inner, recipe)
