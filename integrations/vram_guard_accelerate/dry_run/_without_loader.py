"""Loops that make their batches without a ``DataLoader``: they are followed at their own batch size alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_guard.apply.microbatch import CannotSplitError, batch_size
from vram_guard.capture.loader import Sample
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.simulate.tracing.batches import leaves_of


def without_loader(called: dict[str, Any], wanted: Callable[[int], bool]) -> Sample:
    """What stands for the samples of a loop that loads them without a ``DataLoader``.

    Args:
        called: the arguments of its first call of a model in training, by name.
        wanted: whether one of the script's own options says that a batch has so many samples.
    """
    sizes = [size for leaf in leaves_of(called) for size in getattr(leaf, "shape", ())]
    named = next((size for size in sizes if wanted(size)), None)
    try:
        size = batch_size(called) if named is None else named
    except CannotSplitError:
        size = 1

    def refuse(_size: int) -> Any:
        raise UnsupportedStepError(reason)

    reason = _("the script loads its batches without a DataLoader: other sizes of them cannot be made")
    note = _("of a loop without a DataLoader, what follows its first two optimizer steps is not included")
    return Sample(refuse, size, None, None, refuse, reason, (note,))
