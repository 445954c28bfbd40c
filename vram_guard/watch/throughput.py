"""Throughput of a training step that really runs, over batch sizes, on whatever device is there."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.simulate.tracing.batches import batch_source, map_tensors
from vram_guard.simulate.tracing.loop import AUTOCAST_DTYPES, TRUE_DTYPES, scalar_loss
from vram_guard.step import TrainingStep
from vram_guard.watch.memory import Failure, drop_traceback, free, reader_for
from vram_guard.watch.oom import is_out_of_memory

#: The first steps make optimizer states, choose kernels and fill the allocator's cache.
WARM_UP = 2

#: At least so many steps are timed, and then as many as the seconds allow.
FEWEST, MOST = 3, 200
SECONDS = 2.0
#: Sizes in a row without a gain of 2% after which no larger one is tried.
PATIENCE = 2


@dataclass(frozen=True)
class MeasuredBatch:
    """One batch size. Bytes and seconds."""

    batch_size: int
    """Samples of one micro-batch."""
    seconds: float | None
    """The median optimizer step; None where it did not run."""
    samples_per_second: float | None
    spread: float | None
    """Half the interquartile range over the median."""
    steps: int
    peak_reserved: int | None
    """None where PyTorch does not count the device's memory."""
    failure: str = ""
    """The out-of-memory error that ended it, "" where none."""


def measure(
    step: TrainingStep,
    sizes: Iterable[int],
    device: torch.device | str,
    *,
    tell: Callable[[MeasuredBatch], None] | None = None,
) -> list[MeasuredBatch]:
    """Train for a short time at each batch size, ascending; end where memory runs out or nothing is gained.

    The model is a copy of the user's own; its weights after that are of no use to anybody.

    Args:
        step: the training step; its model, batch, loss and optimizer are really run.
        sizes: batch sizes.
        device: where.
        tell: called with each result.

    Raises:
        UnsupportedStepError: the step has no optimizer.
    """
    device = torch.device(device)
    reader = reader_for(device)
    results: list[MeasuredBatch] = []
    best, without_gain = 0.0, 0
    loop = RealStep(step, device)
    for size in sorted(set(sizes)):
        found = _one_size(loop, size, device)
        results.append(found)
        if tell is not None:
            tell(found)
        if found.samples_per_second is None:
            break  # what is larger does not fit either
        without_gain = 0 if found.samples_per_second > 1.02 * best else without_gain + 1
        best = max(best, found.samples_per_second)
        if without_gain >= PATIENCE:
            break
        free(reader)
    del loop
    free(reader)
    return results


def _one_size(loop: RealStep, size: int, device: torch.device) -> MeasuredBatch:
    failure: Failure | None = None
    times: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for _time in range(WARM_UP):
            loop.run(size)
        _synchronize(device)
        end = time.perf_counter() + SECONDS
        while len(times) < FEWEST or (time.perf_counter() < end and len(times) < MOST):
            start = time.perf_counter()
            loop.run(size)
            _synchronize(device)
            times.append(time.perf_counter() - start)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = drop_traceback(error)
    if failure is not None:
        loop.forget_gradients()
        free(reader_for(device))
        return MeasuredBatch(size, None, None, None, 0, None, str(failure))
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    median = statistics.median(times)
    low, _middle, high = statistics.quantiles(times, n=4)
    samples = size * loop.step.accumulate
    return MeasuredBatch(size, median, samples / median, (high - low) / 2 / median, len(times), peak)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RealStep:
    """Model and optimizer of a step on a device, and one optimizer step at a time."""

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        if step.optimizer is None:
            raise UnsupportedStepError(_("only a training step has a throughput to measure: give it an optimizer"))
        self.step, self.device = step, device
        self._batch = batch_source(step.batch)
        self._dtype = TRUE_DTYPES.get(step.precision)
        model = copy.deepcopy(step.model) if isinstance(step.model, nn.Module) else step.model()
        self._model: nn.Module = model.to(device=device, dtype=self._dtype).train()
        if step.prepare is not None:
            step.prepare(self._model)
        self._optimizer = step.optimizer(self._model.parameters())
        scaled = step.precision == "16-mixed" and device.type == "cuda"
        self._scaler = torch.amp.GradScaler(device.type) if scaled else None

    def run(self, batch_size: int) -> None:
        """One optimizer step of ``step.accumulate`` micro-batches."""
        for _time in range(self.step.accumulate):
            self._micro_batch(batch_size)
        self._update()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """After a step, and after one that broke off."""
        self._optimizer.zero_grad()

    def _micro_batch(self, batch_size: int) -> None:
        batch = map_tensors(self._placed, self._batch(batch_size))
        dtype = AUTOCAST_DTYPES.get(self.step.precision)
        autocast: Any = torch.autocast(self.device.type, dtype=dtype) if dtype else contextlib.nullcontext()
        with autocast:
            loss = scalar_loss(self.step.loss(self._model, batch)) / self.step.accumulate
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self._dtype if tensor.is_floating_point() else None)

    def _update(self) -> None:
        if self._scaler is not None and (self.step.clip_grad_norm or self.step.clip_grad_value):
            self._scaler.unscale_(self._optimizer)
        if self.step.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self.step.clip_grad_norm)
        if self.step.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self._model.parameters(), self.step.clip_grad_value)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
