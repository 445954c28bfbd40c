"""Classes of MMEngine and MMCV, told by where they come from: other people give theirs the same names."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_mmengines(thing: Any, *names: str) -> bool:
    """True if the object's class is one of these of MMEngine's own, and no subclass of it."""
    kind = type(thing)
    return kind.__name__ in names and kind.__module__.partition(".")[0] == "mmengine"


def synchronises(model: nn.Module) -> bool:
    """True if a normalisation of the model, of PyTorch or of MMCV, exchanges statistics between processes."""
    return any(_exchanges(type(part)) for part in model.modules())


def _exchanges(kind: type) -> bool:
    return issubclass(kind, nn.SyncBatchNorm) or any(
        base.__name__ == "SyncBatchNorm" and base.__module__.partition(".")[0] == "mmcv" for base in kind.__mro__
    )
