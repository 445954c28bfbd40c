"""What the losses of micro-batches weigh, so that they add up to the loss of their batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.apply.microbatch import CannotSplitError, MicroBatch, Splitter

if TYPE_CHECKING:
    import torch

#: What the user's loss is, over the samples of a batch: their mean, their sum, or a mean over something else,
#: told by a function that counts it in a batch (labels that are not ignored, say).
LossWeight = Literal["mean", "sum"] | Callable[[Any], Any]


def loss_weights(micro_batches: list[MicroBatch], loss_weight: LossWeight) -> list[Any]:
    """What each micro-batch's loss is multiplied with, so that they add up to the loss of the batch."""
    if loss_weight == "sum":
        return [1.0] * len(micro_batches)
    if loss_weight == "mean":
        return [micro_batch.weight for micro_batch in micro_batches]
    counts = [loss_weight(micro_batch.data) for micro_batch in micro_batches]
    total = sum(counts)
    return [count / total for count in counts]


def split_or_warn(splitter: Splitter, batch: Any) -> list[MicroBatch]:
    """The micro-batches; a batch unlike the others is trained on whole, which is right, if not small."""
    try:
        return splitter.split(batch)
    except CannotSplitError as error:
        warnings.warn(f"vram_guard: {error}; this batch is trained on whole and may not fit", stacklevel=2)
        return [MicroBatch(batch, 1, 1)]


def weighted_sum(values: list[torch.Tensor], weights: list[Any]) -> torch.Tensor:
    """The values of a batch from those of its micro-batches; none of their graphs is kept."""
    import torch

    return torch.stack([value.detach() * weight for value, weight in zip(values, weights, strict=True)]).sum(0)
