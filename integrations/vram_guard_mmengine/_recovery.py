"""Recovers from a real out-of-memory error: the batch is rolled back, and runs again in smaller micro-batches.

Stands on the model in place of ``train_step`` and ``val_step``. The optimizer's update is not rolled
back: it begins once the gradients of the batch are complete on all ranks. Under DDP the module itself runs, without
its wrapper, whose averaging during backward could hang for a rank that failed; the gradients are averaged
after backward instead. Rolling back is described in :mod:`vram_guard.watch.recovery`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.model import BaseModel, is_model_wrapper

from vram_guard.apply.backward_hooks import why_whole
from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.loss_weight import LossWeight
from vram_guard.apply.microbatch import Splitter
from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.terminal import in_log
from vram_guard.watch.batches import MicroBatches
from vram_guard.watch.memory import reader_for
from vram_guard.watch.optimizer_step import guard_step
from vram_guard.watch.rank_coordinator import coordinator_of
from vram_guard.watch.recovery import MicroBatchSchedule, Recovery
from vram_guard_mmengine import _layouts
from vram_guard_mmengine._kinds import synchronises
from vram_guard_mmengine._split_step import SplitTrainStep

# ruff: noqa: SLF001 - OptimWrapper documents `_inner_count` for those who write their own backward


def why_not(runner: Any) -> str:
    """The reason for which no out-of-memory error is recovered from; "" where it is. Before it is built."""
    if _layouts.layout_of(runner) is not None:
        return _("repeating a step under {strategy} is not known to be safe", strategy=_layouts.SHARDED)
    if runner.world_size == 1:
        return ""
    if runner.cfg.get("sync_bn") or synchronises(runner.model):
        return _("synchronised batch normalisation makes the ranks wait for each other inside forward and backward")
    if not torch.distributed.is_gloo_available():
        return _("this build of torch has no gloo, over which the ranks would agree on what to do")
    return ""


def arm(
    runner: Any,
    splitter: Splitter,
    schedule: MicroBatchSchedule,
    loss_weight: LossWeight,
    *,
    graphs: LossGraphs | None,
    most: int,
    prediction_text: Callable[[], str],
    on_failure: Callable[[Any], None],
) -> Callable[[], None]:
    """Arm a runner whose parts are built, on every rank at the same point; returns the function that undoes it."""
    model = runner.model
    module = model.module if is_model_wrapper(model) else model
    recovery = Recovery(
        module,
        ranks=coordinator_of(module, model),
        memory=reader_for(torch.device(get_device())),
        most=most,
        log=lambda line: runner.logger.warning("vram_guard: %s", in_log(line, runner.logger)),
        prediction_text=prediction_text,
        on_failure=on_failure,
        frameworks=("mmengine",),
    )
    batches = MicroBatches(
        splitter,
        loss_weight,
        graphs=graphs,
        recovery=recovery,
        schedule=schedule,
        why_whole=functools.partial(why_whole, module),
    )
    undo = [
        recovery.ranks.close,
        replace_attributes(model, {"train_step": RecoveringTrainStep(runner, batches)}),
        replace_attributes(model, {"val_step": _val_step(model.val_step, batches.for_validation())}),
        guard_step(runner.optim_wrapper.optimizer, recovery, functools.partial(_last_checkpoint, runner)),
    ]

    def all_undone() -> None:
        while undo:
            undo.pop()()

    return all_undone


def _last_checkpoint(runner: Any) -> str:
    return str(runner.message_hub.runtime_info.get("last_ckpt") or "")


class RecoveringTrainStep(SplitTrainStep):
    """In place of a model's ``train_step``."""

    def __init__(self, runner: Any, batches: MicroBatches) -> None:
        model = runner.model
        # MMDistributedDataParallel.train_step is BaseModel's, but for the wrapper that forward goes through.
        own = functools.partial(BaseModel.train_step, model.module) if is_model_wrapper(model) else model.train_step
        super().__init__(own, batches)
        self._runner = runner

    def __call__(self, data: Any, optim_wrapper: Any) -> Any:
        """The log variables of the whole batch, as ``train_step`` returns them."""
        count = optim_wrapper._inner_count

        def one(attempt: Any, share: Any) -> Any:
            if share.first:
                optim_wrapper._inner_count = count
            return self._one(share, optim_wrapper, attempt)

        return self._batches.run(
            data,
            lambda batch: batch.run(functools.partial(one, batch.attempt), rows=False),
            synchronise=optim_wrapper.should_sync(),
            what=_("iteration {number}", number=self._runner.iter + 1),
        )


def _val_step(as_written: Callable[[Any], Any], batches: MicroBatches) -> Callable[[Any], Any]:
    """In place of a model's ``val_step``: whole until memory runs out, then in slices, each rank for itself."""

    def val_step(data: Any) -> Any:
        return batches.run(
            data,
            lambda batch: batch.run(lambda share: as_written(share.data), otherwise=_chained),
            what=_("a validation batch"),
        )

    return val_step


def _chained(outputs: Any) -> list[Any]:
    """The predictions for a batch, from those for its slices."""
    return [prediction for output in outputs for prediction in output]
