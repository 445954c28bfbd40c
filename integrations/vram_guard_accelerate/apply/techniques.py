"""A plan's techniques on what Accelerate has prepared: the same functions for the dry run and for the real one."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.sliced_forward import slice_forward

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.apply.microbatch import Layout
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
    models: Iterable[tuple[nn.Module, Layout | None]],
    batch_size: int,
    micro_batch_size: int,
    *,
    compares: bool = False,
    **how: Any,
) -> None:
    """Every trained model works in slices of so many samples, inside DistributedDataParallel.

    Args:
        accelerator: the script's.
        models: each with the layout of its arguments; None: each call is read by itself.
        batch_size: samples of a full batch.
        micro_batch_size: samples of a slice.
        compares: whether each loss that a model returns is compared with those before it.
        **how: the other arguments of :func:`slice_forward`.
    """

    def scale() -> float:
        scaler = accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    for model, layout in models:
        if any(parameter.requires_grad for parameter in model.parameters()):
            graphs = LossGraphs(model) if compares else None
            inner = within(model)
            slice_forward(inner, batch_size, micro_batch_size, layout=layout, scale=scale, graphs=graphs, **how)


def within(model: nn.Module) -> nn.Module:
    """The module of a script's own DistributedDataParallel, which would reduce the gradients of every slice."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def set_optimizers(accelerator: Any, recipe: Recipe) -> None:
    """The prepared optimizers in the form that the recipe names (for-loop, fused): in place."""
    from vram_guard.techniques.placement import optimizer_for

    for optimizer in accelerator._optimizers:
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer_for(inner, recipe)
