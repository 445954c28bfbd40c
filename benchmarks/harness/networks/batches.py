"""Batches of any size, and losses.

Inputs are random and weights freshly initialised, so that half precision neither overflows nor divides by nothing;
the samples of a batch are copies of one (their values decide nothing about memory, and making them is quick).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

Batch = dict[str, Tensor]
Batches = Callable[[int], Batch]


def random(*shape: int) -> Tensor:
    """One sample."""
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


def copies(sample: Tensor, size: int) -> Tensor:
    """A batch of copies of one sample."""
    return sample.repeat(size, *(1 for _ in sample.shape[1:]))


def classified(*shape: int, classes: int) -> Batches:
    """Inputs "x" with labels "y"."""
    return lambda size: {"x": copies(random(*shape), size), "y": torch.arange(size) % classes}


def regression(*shape: int) -> Batches:
    """Inputs "x" with targets "y" of the same shape."""
    return lambda size: {"x": copies(random(*shape), size), "y": copies(random(*shape), size)}


def language(length: int, vocabulary: int) -> Batches:
    """Tokens that are their own labels."""

    def batch(size: int) -> Batch:
        sample = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
        ids = copies(sample, size)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def masked_language(length: int, vocabulary: int, padded: int) -> Batches:
    """The same with a mask that leaves out the last ``padded`` tokens."""

    def batch(size: int) -> Batch:
        whole = language(length, vocabulary)(size)
        whole["attention_mask"] = torch.ones(size, length, dtype=torch.long)
        whole["attention_mask"][:, length - padded :] = 0
        return whole

    return batch


def whole_sequences(length: int) -> Batches:
    """Tokens whose labels are the same tensor, with a mask that leaves out none."""

    def batch(size: int) -> Batch:
        ids = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return batch


def vit_images(size: int) -> Batch:
    """Images (N, 3, 224, 224) as transformers names them."""
    return {"pixel_values": copies(random(3, 224, 224), size), "labels": torch.arange(size) % 2}


def shapes_of_images(side: int, layout: torch.memory_format = torch.contiguous_format) -> Callable[[int], Any]:
    """(images, labels) for batches of thousands: shapes are enough, and images of real memory would not be."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.empty(size, 3, side, side, device="meta").contiguous(memory_format=layout)
        return images, torch.zeros(size, dtype=torch.long)

    return batch


def class_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the classes."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def squared_loss(model: Any, batch: Batch) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of every token."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def own_loss(model: Any, batch: Batch) -> Tensor:
    """The loss of transformers' models, which compute it themselves."""
    loss: Tensor = model(**batch).loss
    return loss
