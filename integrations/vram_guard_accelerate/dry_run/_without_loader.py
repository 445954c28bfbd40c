"""Loops that make their batches without a ``DataLoader``: they are followed at their own batch size alone."""

from __future__ import annotations

from typing import Any

from vram_guard.apply.microbatch import CannotSplitError, batch_size
from vram_guard.capture.loader import Sample
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _


def without_loader(called: dict[str, Any]) -> Sample:
    """What stands for the samples of a loop that loads them without a ``DataLoader``.

    Args:
        called: the arguments of its first call of a model in training, by name.
    """
    try:
        size = batch_size(called)
    except CannotSplitError:
        size = 1

    def refuse(_size: int) -> Any:
        raise UnsupportedStepError(reason)

    reason = _("the script loads its batches without a DataLoader: other sizes of them cannot be made")
    note = _("of a loop without a DataLoader, what follows its first two optimizer steps is not included")
    return Sample(refuse, size, None, None, refuse, reason, (note,))
