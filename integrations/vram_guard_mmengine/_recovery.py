"""Recovers from a real out-of-memory error in one process: the batch is rolled back, and runs again in smaller parts.

The optimizer's update is not rolled back: it begins once the gradients of the batch are complete. Rolling back is
described in :mod:`vram_guard.watch.recovery`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from mmengine.device import get_device

from vram_guard.apply.backward_hooks import why_whole
from vram_guard.apply.microbatch import Splitter
from vram_guard.guard.guard import Guard
from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.terminal import in_log
from vram_guard.watch.batches import MicroBatches
from vram_guard.watch.memory import reader_for
from vram_guard.watch.recovery import MicroBatchSchedule, Recovery
from vram_guard_mmengine._split_step import SplitTrainStep


def why_not(runner: Any) -> str:
    """The reason for which no out-of-memory error is recovered from; "" where it is. Before it is built."""
    if runner.distributed:
        return _("repeating a step under {strategy} is not known to be safe", strategy="torch.distributed")
    return ""


def arm(runner: Any, spare: Splitter, schedule: MicroBatchSchedule, guard: Guard) -> Callable[[], None]:
    """Arm a runner whose parts are built; returns the function that undoes it."""
    model = runner.model
    recovery = Recovery(
        model,
        memory=reader_for(torch.device(get_device())),
        log=lambda line: runner.logger.warning("vram_guard: %s", in_log(line, runner.logger)),
        prediction_text=guard.prediction,
        on_failure=guard.out_of_memory,
        frameworks=("mmengine",),
    )
    batches = MicroBatches(
        spare,
        guard.loss_weight,
        graphs=guard.graphs,
        recovery=recovery,
        schedule=schedule,
        why_whole=functools.partial(why_whole, model),
    )
    return replace_attributes(model, {"train_step": SplitTrainStep(model.train_step, batches)})
