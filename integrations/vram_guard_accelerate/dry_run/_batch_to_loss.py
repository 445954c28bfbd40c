"""The first training batch of a loop, followed to what ``backward`` is called for.

A model's calls alone do not show which samples met before it or after: a script may mix its batch, and compute its loss
by itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from vram_guard.apply.microbatch import splitter_of
from vram_guard.capture.loader import Sample
from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.proof.samples_apart import LossForm, SamplesApart
from vram_guard.state.containers import leaves
from vram_guard.tensors import without_modes


class BatchToLoss:
    """Follows one batch."""

    def __init__(self) -> None:
        self._apart: SamplesApart | None = None
        self._entered = contextlib.ExitStack()
        self._samples = 0
        self.form = LossForm(0, (), False, _("no batch of its loader was followed to a backward pass"))
        """How the loss adds up the samples of the batch."""

    def made(self, sample: Sample, samples: int) -> Any:
        """A training batch, made; the first one is followed, of others it is known that they are others.

        Args:
            sample: of the training's loader.
            samples: of the batch.
        """
        with contextlib.nullcontext() if self._apart is None else self._apart.aside():
            batch = sample.make(samples)
        if self._apart is not None:
            self._apart.take_for_joined(batch, _("samples of several batches meet"))
        elif not self._samples:
            self._begin(sample, batch, samples)
        return batch

    def _begin(self, sample: Sample, batch: Any, samples: int) -> None:
        self._samples = samples
        with without_modes():
            try:
                parts = splitter_of(sample.make, samples, 1).split(batch)
            except VramGuardError as error:
                self._say(str(error))
                return
            apart = SamplesApart(batch, samples, parts)
            if any(apart.label(one).const for one in leaves(batch) if isinstance(one, torch.Tensor)):
                self._say(_("its batches hold numbers that belong to no single sample"))
                return
        self._apart = apart
        self._entered.enter_context(apart)
        self._entered.enter_context(apart.reading())

    def counted(self, items: Any) -> None:
        """A Trainer has counted the items of an optimizer step, by which it divides the losses of all its batches."""
        if self._apart is not None:
            self._apart.read = ""  # by the count
            self._apart.take_for_constant(items)

    def differentiated(self, loss: torch.Tensor) -> None:
        """A backward pass begins; the first one is read."""
        if self._apart is None:
            return
        apart, self._apart = self._apart, None
        self.form = apart.form(loss)
        self._entered.enter_context(apart.aside())  # other modes may lie above it: it stays where it is

    def _say(self, why: str) -> None:
        self.form = LossForm(self._samples, (), False, why)
