"""The training batches of a loop, each followed to what ``backward`` is called for.

A model's calls alone do not show which samples met before it or after: a script may mix its batch, and compute its loss
by itself, with what it has kept of an earlier batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from vram_guard.apply.microbatch import MicroBatch, Splitter, splitter_of
from vram_guard.capture.loader import Sample
from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.proof.samples_apart import LossForm, SamplesApart
from vram_guard.state.containers import leaves
from vram_guard.tensors import without_modes


class BatchToLoss:
    """Follows one batch after the other: each backward pass ends one."""

    def __init__(self) -> None:
        self._apart: SamplesApart | None = None
        self._splitter: Splitter | None = None
        self._forever = contextlib.ExitStack()
        self._ended = True
        """The batch that is followed has come to its backward pass."""
        self._ahead: list[tuple[Any, list[MicroBatch]]] = []
        """Batches that were made before the earlier one had come to its backward pass."""
        self._forms: list[LossForm] = []
        self._why_not = _("no batch of its loader was followed to a backward pass")

    @property
    def forms(self) -> tuple[LossForm, ...]:
        """How each loss adds up the samples of its batch."""
        return tuple(self._forms) or (LossForm(0, (), False, self._why_not),)

    def made(self, sample: Sample, samples: int) -> Any:
        """A training batch, made, and followed from now on or once the one before has ended.

        Args:
            sample: of the training's loader.
            samples: of the batch.
        """
        with self.aside():
            batch = sample.make(samples)
            with without_modes():
                try:
                    self._splitter = self._splitter or splitter_of(sample.make, samples, 1)
                    parts = self._splitter.split(batch)
                except VramGuardError as error:
                    self._forms.append(LossForm(samples, (), False, str(error)))
                    return batch
        if self._apart is None:
            self._begin(batch, samples, parts)
        elif self._ended:
            self._apart.turn_to(batch, parts)
        else:
            self._apart.take_for_joined(batch, _("samples of several batches meet"))
            self._ahead.append((batch, parts))
        self._ended = False
        return batch

    def _begin(self, batch: Any, samples: int, parts: list[MicroBatch]) -> None:
        self._apart = SamplesApart(batch, samples, parts)
        with without_modes():
            if any(self._apart.label(one).const for one in leaves(batch) if isinstance(one, torch.Tensor)):
                why = _("its batches hold numbers that belong to no single sample")
                self._forms.append(LossForm(samples, (), False, why))
        # Other modes may come to lie above it: it stays where it is.
        self._forever.enter_context(self._apart)
        self._forever.enter_context(self._apart.reading())

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block nothing is followed: gradients, and weights that are updated by them, are no samples."""
        return contextlib.nullcontext() if self._apart is None else self._apart.aside()

    def counted(self, items: Any) -> None:
        """A Trainer has counted the items of an optimizer step, by which it divides the losses of all its batches."""
        if self._apart is not None:
            self._apart.read = ""  # by the count
            self._apart.take_for_constant(items)

    def clipping(self, clip: Callable[[], Any]) -> Any:
        """The norm of gradients that are clipped: that of a step, of however many batches its gradients were added."""
        with self.aside():
            norm = clip()
        if self._apart is not None:
            self._apart.take_for_constant(norm)
        return norm

    def differentiated(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""
        if self._apart is None:
            return
        self._forms.append(self._apart.form(loss))
        self._ended = not self._ahead
        if self._ahead:
            self._apart.turn_to(*self._ahead.pop(0))
