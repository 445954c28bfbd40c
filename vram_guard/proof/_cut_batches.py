"""Parts of a batch that say something about all of its samples, and are handed whole to every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vram_guard.apply.microbatch import Layout, Splitter
from vram_guard.capture.apart import leaf_shapes
from vram_guard.state.containers import parts_of


def of_whole_batch(make: Callable[[int], Any], batch_size: int, micro_batch_size: int, layout: Layout) -> str:
    """The part of a batch that is another in a micro-batch than in a batch of that size: "batch[2]"; "" for none.

    A number of samples beside them, a matrix of pairs of samples, an index into all rows.

    Args:
        make: batch size -> a batch of the loader.
        batch_size: samples of a batch that is cut.
        micro_batch_size: of its first part.
        layout: how it is cut.
    """
    first = Splitter(batch_size, micro_batch_size, layout=layout).split(make(batch_size))[0]
    made, again = (dict(parts_of(make(first.samples))) for _time in range(2))
    for path, part in parts_of(first.data):
        own = made.get(path)
        pairs = _of_pairs(part, own, batch_size, first.samples)
        if pairs or _number(part) != _number(own) == _number(again.get(path)):
            return "batch" + "".join(f"[{key!r}]" for key in path)
    return ""


def differ_in_size(distinct: Callable[[int], Any], batch_size: int, layout: Layout) -> bool:
    """True where samples of different sizes come to the step as they are, which may pad each micro-batch by itself.

    Args:
        distinct: size -> a batch of different samples, large ones in its first half and small ones in the second.
        batch_size: samples of a batch that is cut.
        layout: how it is cut.
    """
    half = min(2, batch_size // 2)
    if not half:
        return False
    first, second = Splitter(2 * half, half, layout=layout).split(distinct(2 * half))
    return leaf_shapes(first.data) != leaf_shapes(second.data)


def _of_pairs(cut: Any, own: Any, batch_size: int, samples: int) -> bool:
    """True where a further dimension of an array is as long as the batch, too; other lengths are those of padding."""
    shapes = [tuple(getattr(one, "shape", ())) for one in (cut, own)]
    return any(
        dim and size != its and size * samples == its * batch_size
        for dim, (size, its) in enumerate(zip(*shapes, strict=False))
    )


def _number(part: Any) -> Any:
    """A number, as it is or in an array without dimensions; None for all others."""
    if isinstance(part, torch.Tensor) or hasattr(part, "shape"):
        return None if tuple(part.shape) or getattr(part, "is_meta", False) else part.item()
    return part if isinstance(part, (int, float)) else None
