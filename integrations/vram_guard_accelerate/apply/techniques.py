"""A plan's techniques on what Accelerate has prepared: the same functions for the dry run and for the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.apply.sliced_forward import slice_forward

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.apply.microbatch import Layout
    from vram_guard.techniques import Recipe

# ruff: noqa: SLF001 - every private name of Accelerate used here stands in private_api.py


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
    models: Iterable[tuple[nn.Module, Layout | None]],
    batch_size: int,
    micro_batch_size: int,
    *,
    loss_weight: Literal["mean", "sum"] = "mean",
    returns_loss: bool = True,
    at_most: int | None = None,
    on_slice: Callable[[], None] = lambda: None,
) -> None:
    """Every trained model works in slices of so many samples; see :func:`slice_forward`.

    Args:
        accelerator: the script's.
        models: each with the layout of its arguments; None: each call is read by itself.
        batch_size: samples of a full batch.
        micro_batch_size: samples of a slice.
        loss_weight: the reduction of a loss that a model returns.
        returns_loss: whether the number that a model returns is what is differentiated.
        at_most: run so many slices and take the others for done.
        on_slice: called before the forward of each slice.
    """

    def scale() -> float:
        scaler = accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    for model, layout in models:
        if any(parameter.requires_grad for parameter in model.parameters()):
            slice_forward(
                model,
                batch_size,
                micro_batch_size,
                layout=layout,
                loss_weight=loss_weight,
                returns_loss=returns_loss,
                scale=scale,
                at_most=at_most,
                on_slice=on_slice,
            )


def set_optimizers(accelerator: Any, recipe: Recipe) -> None:
    """The prepared optimizers in the form that the recipe names (for-loop, fused): in place."""
    from vram_guard.techniques.placement import optimizer_for

    for optimizer in accelerator._optimizers:
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer_for(inner, recipe)
