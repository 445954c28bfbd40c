"""A few real samples of a loader's next batch: those that differ most, so that nothing is equal by chance.

Where they differ in size, a model that pads them itself shows in halves of which one is smaller than the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from vram_guard.apply.microbatch import batch_size, split
from vram_guard.capture.apart import arranged
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import SAMPLES_READ, VALUES_COMPARED
from vram_guard.state.containers import leaves


def few_samples(loader: Any, count: int) -> Any:
    """A batch of ``count`` samples that the loader would deliver next. Its sampler and its data set move on.

    Args:
        loader: that the script trains on.
        count: of samples.

    Raises:
        UnsupportedStepError: there are fewer.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        batch = next(iter(loader.dataset if isinstance(loader, DataLoader) else loader))
        return split(batch, batch_size(batch), count)[0].data
    if isinstance(loader.dataset, IterableDataset):
        found = list(islice(loader.dataset, SAMPLES_READ))
    else:
        found = [loader.dataset[index] for index in islice(next(iter(loader.batch_sampler)), SAMPLES_READ)]
    if len(found) < count:
        raise UnsupportedStepError(_("its batch has {count} samples", count=len(found)))
    different = most_different(found, count)
    others = [sample for sample in found if not any(sample is one for one in different)]
    return loader.collate_fn(arranged([*different, *others], count))


def most_different(samples: Sequence[Any], count: int) -> list[Any]:
    """So many samples, each as far from those before it as can be, by how often whole numbers occur in them.

    Labels, masks and tokens are what a loss leaves out, or weighs; where samples hold none, the first ones.

    Example:
        >>> most_different([1, 1, 2, 1, 3], 3)
        [1, 2, 3]
    """
    waiting = [(sample, _whole_numbers(sample)) for sample in samples]
    chosen = [waiting.pop(0)]
    while len(chosen) < count:
        apart = [min(_distance(counts, other) for _sample, other in chosen) for _sample, counts in waiting]
        chosen.append(waiting.pop(apart.index(max(apart))))
    return [sample for sample, _counts in chosen]


def _whole_numbers(sample: Any) -> dict[Any, float]:
    """Every leaf's whole numbers, by its place, with the share of the leaf that they take."""
    shares: dict[Any, float] = {}
    for place, leaf in enumerate(leaves(sample)):
        try:
            tensor = torch.as_tensor(leaf)
        except (TypeError, ValueError, RuntimeError):  # text, pictures
            continue
        if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
            values = tensor.flatten()[:VALUES_COMPARED].tolist()
            for value, times in Counter(values).items():
                shares[place, value] = times / len(values)
    return shares


def _distance(one: dict[Any, float], other: dict[Any, float]) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())
