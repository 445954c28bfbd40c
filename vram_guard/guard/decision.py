"""The decision about a training, as a value that travels between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vram_guard.apply.microbatch import Splitter
    from vram_guard.plan import Plan


@dataclass(frozen=True)
class Decision:
    """What all ranks hold in common."""

    plan: Plan
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""
    splitter: Splitter | None
    """How loaded batches are cut; None where they stay whole."""
    spare: Splitter | None = None
    """How they would be cut after an out-of-memory error; None where they cannot be."""
    precision: str = "32-true"
    """As written."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Technique -> why this training does not admit it."""
