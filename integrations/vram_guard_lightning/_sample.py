"""Samples from whatever ``train_dataloader`` may return.

The loader that training will use is not touched: the user's hook is asked once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from vram_guard.capture.loader import Sample, read_loader
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard_lightning import _namespaces


def read(loaders: Any) -> Sample:
    """Samples from whatever ``train_dataloader`` may return: a loader, or a collection of loaders.

    Call it inside :func:`vram_guard.capture.loader.random_state_kept`.

    Raises:
        UnsupportedStepError: batches of a known size cannot be had without disturbing the training.
    """
    leaves, structure = pytree.tree_flatten(_namespaces.loader_tree(loaders), is_leaf=_is_batches)
    if not leaves:
        raise UnsupportedStepError(_("the train dataloader is an empty collection"))
    samples = [read_loader(leaf) for leaf in leaves]
    if len(samples) == 1 and structure.num_nodes == 1:
        return samples[0]
    sizes = {sample.batch_size for sample in samples}
    if len(sizes) > 1:
        raise UnsupportedStepError(
            _(
                "the train dataloaders deliver batches of different sizes ({found} samples), so there is no one "
                "batch size to predict for; give them the same batch_size",
                found=_(" and ").join(map(str, sorted(sizes))),
            )
        )
    known = [sample.dataset_size for sample in samples if sample.dataset_size is not None]
    return Sample(
        make=lambda size: pytree.tree_unflatten([sample.make(size) for sample in samples], structure),
        batch_size=sizes.pop(),
        dataset_size=max(known, default=None),
        loader=loaders,
        distinct=lambda size: pytree.tree_unflatten([sample.distinct(size) for sample in samples], structure),
        growable=next((sample.growable for sample in samples if sample.growable), ""),
        notes=tuple(dict.fromkeys(note for sample in samples for note in sample.notes)),
        parts=tuple(part for sample in samples for part in sample.parts),
    )


def loaders_in(loaders: Any) -> list[Any]:
    """The loaders of whatever a ``*_dataloader`` hook may return."""
    found: list[Any] = pytree.tree_leaves(_namespaces.loader_tree(loaders), is_leaf=_is_batches)
    return found


def _is_batches(leaf: Any) -> bool:
    """A loader, rather than a collection of loaders."""
    return not isinstance(leaf, (dict, list, tuple)) or _holds_batches(leaf)


def _holds_batches(leaf: Any) -> bool:
    """A plain list of ready batches is a loader too: Lightning iterates whatever it is given."""
    parts = list(leaf.values() if isinstance(leaf, dict) else leaf)
    return bool(parts) and all(isinstance(part, torch.Tensor) for part in parts)
