"""The training loop, for real: the same order of events as the symbolic one (vram_guard.simulate.tracing.run)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.gpu.ranks import Rank
from vram_guard.step import TrainingStep
from vram_guard.techniques import install, optimizer_for, place, step_where

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_TRUE = {"16-true": torch.float16, "bf16-true": torch.bfloat16}

#: A GradScaler starts too high and skips updates until its scale fits: so many iterations are tried at most.
MOST_ITERATIONS = 12


class RealLoop:
    """Model, optimizer and batch of one step on a device. As in a script, they live until the end.

    Attributes:
        updates: optimizer steps that were really made.
        skipped: optimizer steps that the GradScaler refused.
        keeps_batch: iterations take the batch that is on the device, instead of making one: for timing the step alone.
    """

    def __init__(self, step: TrainingStep, batch_size: int, device: str) -> None:
        self.step = step
        self.batch_size = batch_size
        self.device = device
        self.dtype = _TRUE.get(step.precision)
        rank = Rank(step, device) if step.parallel is not None else None
        self.model: Any = self._placed_model() if rank is None else self._shared_model(rank)
        assert step.optimizer is not None
        self.optimizer = optimizer_for(step.optimizer(self.model.parameters()), step.recipe)
        if rank is not None:
            self.optimizer = rank.optimizer(self.optimizer)
        step_where((self.optimizer,), step.recipe)
        self.scaler = torch.amp.GradScaler(device) if step.precision == "16-mixed" else None
        self.batch: Any = None
        self.loss: Any = None
        self.keeps_batch = False
        self.updates = 0
        self.skipped = 0

    def _placed_model(self) -> nn.Module:
        built: Any = self.step.model
        model: nn.Module = (built if isinstance(built, nn.Module) else built()).to(self.dtype)
        place(model, self.step.recipe, self.device, self.step.precision)
        model = model.to(self.device).train()
        install(model, self.step.recipe)
        return model

    def _shared_model(self, rank: Rank) -> nn.Module:
        model = rank.model().train()
        install(getattr(model, "module", model), self.step.recipe)
        return model

    def run(self, updates: int, after_update: Callable[[], None]) -> None:
        """Iterate until so many updates were made; what the scaler refuses does not count."""
        for _ in range(MOST_ITERATIONS):
            self._iterate()
            after_update()
            if self.updates == updates:
                return

    def place_batch(self) -> None:
        """Make a batch on the CPU and copy it to the device; the old one dies first, as in ``for batch in loader``."""
        self.batch = None
        self.batch = pytree.tree_map(self._to_device, self.step.batch(self.batch_size))

    def repeat(self) -> None:
        """One more iteration on the batch that is there, without asking whether the scaler refused the update.

        The question waits for the device, which a training loop does not do.
        """
        self.keeps_batch = True
        self._iterate(counted=False)

    def _iterate(self, *, counted: bool = True) -> None:
        if self.step.zero_grad == "before_forward":
            self.optimizer.zero_grad()
        for micro in range(self.step.accumulate):
            if not self.keeps_batch:
                self.place_batch()
            self._forward()
            if micro == 0 and self.step.zero_grad == "before_backward":
                self.optimizer.zero_grad()
            self._backward()
        self._update(counted)
        if self.step.zero_grad == "after_step":
            self.optimizer.zero_grad()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype if tensor.is_floating_point() else None).to(self.device)

    def _forward(self) -> None:
        dtype = _AUTOCAST.get(self.step.precision)
        if dtype is torch.float16 and self.device == "cpu":
            dtype = torch.bfloat16  # only tries the code: float16 products take minutes there
        with torch.autocast(self.device, dtype=dtype) if dtype else contextlib.nullcontext():
            self.loss = self.step.loss(self.model, self.batch)

    def _backward(self) -> None:
        loss = self.loss if self.step.accumulate == 1 else self.loss / self.step.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _update(self, counted: bool) -> None:
        if self.step.clip_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.step.clip_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
            self.updates += 1
            return
        before = self.scaler.get_scale() if counted else 0.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not counted:
            return
        refused = self.scaler.get_scale() < before
        self.skipped += refused
        self.updates += not refused
