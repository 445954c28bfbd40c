"""A plan's techniques on what Accelerate has prepared: the same functions for the dry run and for the real one."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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


def set_optimizers(accelerator: Any, recipe: Recipe) -> None:
    """The prepared optimizers in the form that the recipe names (for-loop, fused): in place."""
    from vram_guard.techniques.placement import optimizer_for

    for optimizer in accelerator._optimizers:
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer_for(inner, recipe)
