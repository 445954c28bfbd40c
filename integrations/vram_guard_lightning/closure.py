"""Trains on a loaded batch in micro-batches, inside Lightning's automatic optimization.

Lightning makes one closure per loaded batch: training_step, freeing the gradients, backward. Only that
closure is replaced, so everything that counts batches or steps (samplers, schedulers, global_step,
val_check_interval, max_steps, logging intervals, accumulate_grad_batches, resuming within an epoch) stays
exactly as the user set it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.loss_weight import LossWeight, loss_weights, split_or_warn
from vram_guard.apply.microbatch import MicroBatch, Splitter
from vram_guard_lightning.step_log import StepLog

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here stands in private_api.py


def install(trainer: Trainer, splitter: Splitter, loss_weight: LossWeight = "mean") -> Callable[[], None]:
    """Split the batches of this Trainer; returns the function that undoes it."""
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    lightnings_own = loop._make_closure

    def make_closure(kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        micro_batches = split_or_warn(splitter, kwargs["batch"])
        if len(micro_batches) == 1:
            return lightnings_own(kwargs, optimizer, batch_idx)
        return MicroBatchClosure(trainer, kwargs, optimizer, batch_idx, micro_batches, loss_weight)

    loop._make_closure = make_closure

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo


class MicroBatchClosure:
    """What the optimizer calls for one loaded batch; may be called several times (LBFGS)."""

    def __init__(
        self,
        trainer: Trainer,
        kwargs: Mapping[str, Any],
        optimizer: Any,
        batch_idx: int,
        micro_batches: list[MicroBatch],
        loss_weight: LossWeight = "mean",
    ) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._kwargs = kwargs
        self._micro_batches = micro_batches
        self._loss_weight = loss_weight
        self._backward = self._loop._make_backward_fn(optimizer)
        self._zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        self._result: Any = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> torch.Tensor | None:
        """Gradients of the whole batch, in micro-batches; returns the batch's loss, None if there is none."""
        log = StepLog(self._trainer.fit_loop.epoch_loop._results)
        with torch.enable_grad(), log.gathering():
            self._result = self._run(log)
        loss: torch.Tensor | None = self._result.loss
        return loss

    def consume_result(self) -> Any:
        """The result, once: Lightning asks for it after the optimizer step."""
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError("the optimizer step did not call its closure; call it in optimizer_step")
        return result

    def _run(self, log: StepLog) -> Any:
        """The result of the whole batch, in Lightning's form."""
        losses: list[torch.Tensor] = []
        extras: list[dict[str, Any]] = []
        weights = loss_weights(self._micro_batches, self._loss_weight)
        last = len(self._micro_batches) - 1
        for index, (micro_batch, weight) in enumerate(zip(self._micro_batches, weights, strict=True)):
            log.next_micro_batch(micro_batch.samples)
            with self._gradients_stay_here(stay=index < last):
                loss, extra = self._one(micro_batch, weight, first=index == 0)
            extras.append(extra)
            if loss is not None:
                losses.append(loss)
        result = self._loop.output_result_cls(None, extra=merged(extras, self._micro_batches))
        result.loss = torch.stack(losses).sum(0) if losses else None
        return result

    def _one(self, micro_batch: MicroBatch, weight: Any, *, first: bool) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """training_step and backward of one micro-batch, in Lightning's order; its share of the loss."""
        output = self._loop._make_step_fn({**self._kwargs, "batch": micro_batch.data})()
        if first and self._zero_grad is not None:
            self._zero_grad()
        extra = {name: _detached(value) for name, value in output.extra.items()}
        if output.closure_loss is None:
            warnings.warn("training_step returned None for a micro-batch, which is left out", stacklevel=2)
            return None, extra
        loss = output.closure_loss * weight
        share: torch.Tensor = loss.detach().clone()  # gradient scaling may change the other one in place
        if self._backward is not None:
            self._backward(loss)
        return share, extra

    def _gradients_stay_here(self, *, stay: bool) -> contextlib.AbstractContextManager[Any]:
        """Under DDP, gradients are averaged over the ranks once, in the last micro-batch's backward."""
        block = getattr(self._trainer.strategy, "block_backward_sync", None)
        return block() if stay and block is not None else contextlib.nullcontext()


def _detached(value: Any) -> Any:
    """Without its graph, which would keep this micro-batch's activations while the next one runs."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    return value


def merged(extras: list[dict[str, Any]], micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """Outputs beside the loss, as training_step would have returned them for the whole batch.

    A tensor with a row per sample is joined; a floating-point scalar becomes the mean over samples; of
    anything else the last micro-batch's is kept.
    """
    names = dict.fromkeys(name for extra in extras for name in extra)
    return {name: _merged_value(name, extras, micro_batches) for name in names}


def _merged_value(name: str, extras: list[dict[str, Any]], micro_batches: list[MicroBatch]) -> Any:
    values = [extra.get(name) for extra in extras]
    sizes = [micro_batch.samples for micro_batch in micro_batches]
    if all(isinstance(value, torch.Tensor) for value in values):
        tensors: list[torch.Tensor] = values  # type: ignore[assignment]
        if all(tensor.ndim and len(tensor) == size for tensor, size in zip(tensors, sizes, strict=True)):
            return torch.cat(tensors)
        if all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors):
            return torch.stack([t * size for t, size in zip(tensors, sizes, strict=True)]).sum() / sum(sizes)
    return values[-1]
