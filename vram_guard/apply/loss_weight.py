"""Weights of the losses of micro-batches, so that they add up to the loss of their batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from vram_guard.apply.microbatch import CannotSplitError, MicroBatch, Splitter
from vram_guard.apply.normalisers import Normaliser
from vram_guard.language import _

#: The reduction of the user's loss over the samples of a batch: their mean, their sum, or a mean over something else,
#: given as a function that counts it in a batch (labels that are not ignored, say), such as a
#: :class:`vram_guard.apply.normalisers.Normaliser`.
LossWeight = Literal["mean", "sum"] | Callable[[Any], Any]

#: The label that torch's cross-entropy leaves out of its mean (``ignore_index``).
IGNORED = -100


def bound_to(model: torch.nn.Module, loss_weight: LossWeight) -> LossWeight:
    """The same weighting, which reads from this model what it weighs by, see :meth:`Normaliser.bound`."""
    return loss_weight.bound(model) if isinstance(loss_weight, Normaliser) else loss_weight


def loss_weights(micro_batches: list[MicroBatch], loss_weight: LossWeight) -> list[Any]:
    """Factors of the micro-batches' losses, so that they add up to the loss of the batch.

    Where nothing in the batch counts, its loss is as undefined as it was, and what is added to it is a mean.
    """
    if loss_weight == "sum":
        return [1.0] * len(micro_batches)
    by_samples = [micro_batch.weight for micro_batch in micro_batches]
    if loss_weight == "mean":
        return by_samples
    counts = [loss_weight(micro_batch.data) for micro_batch in micro_batches]
    total = sum(counts)
    if not isinstance(total, torch.Tensor):
        return [count / total for count in counts] if total else by_samples
    # Not asked for its value, which would wait for the GPU.
    return [torch.where(total == 0, share, count / total) for share, count in zip(by_samples, counts, strict=True)]


def split_or_warn(splitter: Splitter, batch: Any, why_whole: str = "", parts: int | None = None) -> list[MicroBatch]:
    """The micro-batches; a batch unlike the others is trained on whole, which is right, if not small.

    Args:
        splitter: of the loader.
        batch: of it.
        why_whole: the reason for which it must not be cut; "" for none.
        parts: their number; None: as many as the splitter's size asks for.
    """
    error = CannotSplitError("batch", why_whole)
    if not why_whole:
        try:
            return splitter.split(batch, parts)
        except CannotSplitError as found:
            error = found
    said = _("{why}; this batch is trained without splitting it and may not fit", why=error)
    warnings.warn(f"vram_guard: {said}", stacklevel=2)
    return [MicroBatch(batch, 1, 1)]


def weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[Any]) -> torch.Tensor:
    """The values of a batch from those of its micro-batches; none of their graphs is kept."""
    return torch.stack([value.detach() * weight for value, weight in zip(values, weights, strict=True)]).sum(0)
