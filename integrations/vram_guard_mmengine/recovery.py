"""Goes on after a real out-of-memory error: the batch is taken back, and runs again in smaller micro-batches.

Stands on the model in place of ``train_step`` and ``val_step``. The optimizer's update is not part of what is taken
back: it begins once the gradients of the batch are complete on all ranks. Under DDP the module itself runs, without
its wrapper, whose averaging during backward could wait for ever for a rank that failed; the gradients are averaged
after backward instead. What taking back means is described in :mod:`vram_guard.watch.recovery`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from mmengine.model import BaseModel, is_model_wrapper

from vram_guard.apply.loss_weight import LossWeight, loss_weights, split_or_warn
from vram_guard.apply.microbatch import MicroBatch, Splitter, batch_size
from vram_guard.watch.optimizer_step import guard_step
from vram_guard.watch.rank_coordinator import DataParallel, RankCoordinator, SingleProcess
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery
from vram_guard_mmengine.split_step import Part, detached, merged

if TYPE_CHECKING:
    from torch import nn

# ruff: noqa: SLF001 - OptimWrapper documents `_inner_count` for those who write their own backward


def why_not(runner: Any) -> str:
    """Why this training cannot be taken through an out-of-memory error; "" where it can. Before it is built."""
    if runner.world_size == 1:
        return ""
    if runner.cfg.get("sync_bn") or any("SyncBatchNorm" in type(part).__name__ for part in runner.model.modules()):
        return "synchronised batch normalisation makes the ranks wait for each other inside forward and backward"
    if not torch.distributed.is_gloo_available():
        return "this build of torch has no gloo, over which the ranks would settle what to do"
    return ""


def recovery_of(runner: Any, *, most: int, outlook: Callable[[], str], on_failure: Callable[[Any], None]) -> Recovery:
    """The recovery of a runner whose parts are built; on every rank at the same point."""
    from mmengine.device import get_device

    from vram_guard.watch.memory import reader_for

    return Recovery(
        _module(runner.model),
        agreement=_agreement(runner.model),
        memory=reader_for(torch.device(get_device())),
        most=most,
        tell=lambda line: runner.logger.warning("vram_guard: %s", line),
        outlook=outlook,
        on_failure=on_failure,
    )


def _module(model: nn.Module) -> nn.Module:
    module: nn.Module = model.module if is_model_wrapper(model) else model  # type: ignore[assignment]
    return module


def _agreement(model: Any) -> RankCoordinator:
    if not is_model_wrapper(model):
        return SingleProcess()
    return DataParallel(model.module, broadcast_buffers=bool(model.broadcast_buffers))


def install(
    runner: Any, recovery: Recovery, splitter: Splitter, ladder: MicroBatchSchedule, loss_weight: LossWeight
) -> Callable[[], None]:
    """Arm a runner; returns the function that undoes it."""
    model = runner.model
    before = {name: vars(model)[name] for name in ("train_step", "val_step") if name in vars(model)}
    vars(model)["train_step"] = TrainStep(runner, recovery, splitter, ladder, loss_weight)
    vars(model)["val_step"] = ValStep(model.val_step, recovery)
    free_step = guard_step(runner.optim_wrapper.optimizer, recovery, functools.partial(_last_checkpoint, runner))

    def undo() -> None:
        free_step()
        for name in ("train_step", "val_step"):
            vars(model).pop(name, None)
        vars(model).update(before)

    return undo


def _last_checkpoint(runner: Any) -> str:
    return str(runner.message_hub.runtime_info.get("last_ckpt") or "")


class TrainStep:
    """In place of a model's ``train_step``."""

    def __init__(
        self, runner: Any, recovery: Recovery, splitter: Splitter, ladder: MicroBatchSchedule, loss_weight: LossWeight
    ) -> None:
        model = runner.model
        self._runner = runner
        # MMDistributedDataParallel.train_step is BaseModel's, but for the wrapper that forward goes through.
        own = functools.partial(BaseModel.train_step, model.module) if is_model_wrapper(model) else model.train_step
        self._as_written: Callable[..., Any] = own
        self._recovery = recovery
        self._splitter = splitter
        self._ladder = ladder
        self._loss_weight = loss_weight

    def __call__(self, data: Any, optim_wrapper: Any) -> Any:
        """The log variables of the whole batch, as ``train_step`` returns them."""
        return self._recovery.run(
            functools.partial(self._attempt, data, optim_wrapper, optim_wrapper._inner_count),
            self._ladder,
            lambda: sum(part.samples for part in self._splitter.split(data)),
            synchronise=optim_wrapper.should_sync(),
            what=f"iteration {self._runner.iter + 1}",
        )

    def _attempt(self, data: Any, optim_wrapper: Any, count: int, attempt: Attempt) -> Any:
        optim_wrapper._inner_count = count
        parts = self._split(data, attempt.micro_batch_size)
        weights = loss_weights(parts, self._loss_weight) if len(parts) > 1 else [1.0]
        outputs = []
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            wrapper = Part(optim_wrapper, weight, last=index == len(parts) - 1, attempt=attempt)
            output = self._as_written(part.data, optim_wrapper=wrapper)
            outputs.append(detached(output) if len(parts) > 1 else output)
        return merged(outputs, parts, weights) if len(parts) > 1 else outputs[0]

    def _split(self, data: Any, size: int | None) -> list[MicroBatch]:
        if size is None:
            return [MicroBatch(data, 1, 1)]
        self._splitter.micro_batch_size = size
        return split_or_warn(self._splitter, data)


class ValStep:
    """In place of a model's ``val_step``: whole until memory runs out, then in slices, each rank for itself."""

    def __init__(self, as_written: Callable[[Any], Any], training: Recovery) -> None:
        self._as_written = as_written
        self._training = training
        self._ladder = MicroBatchSchedule()
        self._splitter: Splitter | None = None
        own = training
        self._recovery = Recovery(
            own.model, SingleProcess(), own.memory, own.most, own.tell, own.outlook, own.on_failure
        )

    def __call__(self, data: Any) -> Any:
        """The predictions for the batch."""
        self._recovery.count = self._training.count
        try:
            return self._recovery.run(
                functools.partial(self._attempt, data),
                self._ladder,
                functools.partial(self._samples_of, data),
                what="a validation batch",
            )
        finally:
            self._training.count = self._recovery.count

    def _attempt(self, data: Any, attempt: Attempt) -> Any:
        if attempt.micro_batch_size is None or self._splitter is None:
            return self._as_written(data)
        self._splitter.micro_batch_size = attempt.micro_batch_size
        outputs = [self._as_written(part.data) for part in self._splitter.split(data)]
        return [prediction for output in outputs for prediction in output]

    def _samples_of(self, data: Any) -> int:
        size = batch_size(data)
        self._splitter = self._splitter or Splitter(size, size)
        return size
