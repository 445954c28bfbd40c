"""One batch at any batch size: from the user's callable, or from one example batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.state.containers import children, own_copy, rebuilt


def leading_size(batch: Any) -> int:
    """The batch dimension of an example: the leading size that most of its tensors share.

    Raises:
        InvalidInputError: there is no tensor, or the leading sizes disagree.
    """
    sizes = Counter(leaf.shape[0] for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    if not sizes:
        raise InvalidInputError(
            _("the example batch holds no tensor with a leading dimension; give a callable batch_size -> batch")
        )
    (size, count), *others = sizes.most_common()
    if others and others[0][1] == count:
        raise InvalidInputError(
            _(
                "the example batch's tensors have different leading sizes ({sizes}); give a callable batch_size -> "
                "batch",
                sizes=", ".join(map(str, sorted(sizes))),
            )
        )
    return size


def leaves_of(batch: Any) -> Iterator[Any]:
    """Everything in a batch that is no container: pytree's own, those registered with it, mappings and data classes."""
    for leaf in pytree.tree_leaves(_plain(batch)):
        parts = children(leaf)
        if parts is None:
            yield leaf
        else:
            for part in parts.values():
                yield from leaves_of(part)


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with ``function`` applied to its :func:`leaves_of`."""

    def change(leaf: Any) -> Any:
        parts = children(leaf)
        if parts is None:
            return function(leaf)
        changed = {key: _mapped(function, part) for key, part in parts.items()}
        same = all(changed[key] is part for key, part in parts.items())
        return leaf if same else rebuilt(leaf, changed)

    return pytree.tree_map(change, batch)


def _plain(batch: Any) -> Any:
    """Mappings that pytree does not know (Hugging Face's BatchEncoding) become dicts."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return {key: batch[key] for key in batch}
    return batch


def resized(batch: Any, size: int) -> Any:
    """The example batch with ``size`` samples: its own, repeated in order, where there are too few.

    Tensors whose leading dimension is not the batch's stay as they are, and so does everything else. Lists whose
    length is the batch size (one entry a sample) are resized as tensors are.
    """
    before = leading_size(batch)
    if before == size:
        return batch

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == before:
            return leaf[torch.arange(size) % before]
        return leaf

    return _mapped(change, _plain(batch))


def batch_source(batch: Any) -> Callable[[int], Any]:
    """``batch_size -> batch`` from either form that a TrainingStep allows; a step may write into what it is given."""
    if callable(batch) and not isinstance(batch, torch.Tensor):
        return lambda size: own_copy(batch(size))
    return lambda size: own_copy(resized(batch, size))


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Any, device: torch.device | None = None
) -> Any:
    """The batch with ``function`` applied to its tensors.

    Args:
        function: of a tensor.
        batch: nested containers.
        device: for objects that are no containers and move themselves (``.to``: graphs of torch_geometric), as
            frameworks have them do; None: they stay as they are.
    """

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        moves = device is not None and callable(getattr(leaf, "to", None)) and not isinstance(leaf, (type, nn.Module))
        return leaf.to(device) if moves else leaf

    plain = _plain(batch)
    moved = _mapped(change, plain)
    if plain is batch:
        return moved
    try:
        return type(batch)(moved)
    except TypeError:
        return moved
