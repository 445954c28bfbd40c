"""The decision about a training, as a value that travels between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.apply.microbatch import Splitter
    from vram_guard.plan import Plan
    from vram_guard.watch.corrections import Subject


@dataclass(frozen=True)
class Decision:
    """The decision that all ranks share."""

    plan: Plan
    notes: tuple[str, ...]
    """Remarks for a reader of the prediction, and the requests that were refused, each with its reason."""
    splitter: Splitter | None
    """Cuts loaded batches; None where they stay whole."""
    spare: Splitter | None = None
    """Cuts them after an out-of-memory error; None where they cannot be cut."""
    about: Subject | None = None
    """What the first steps' measurement is remembered under; None where PyTorch counts no memory."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Technique -> why this training does not admit it."""
    loss_weight: LossWeight | None = None
    """Of micro-batches, as it was found out; None: as the settings say."""
    unproven: str = ""
    """Why batches may not be cut after an out-of-memory error, though they could be; "" where they may."""
