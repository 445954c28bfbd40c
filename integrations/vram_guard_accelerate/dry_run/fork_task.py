"""The task of a copy of a script."""

from __future__ import annotations

from dataclasses import dataclass

from vram_guard.plan.source import TraceRequest


@dataclass(frozen=True)
class ForkTask:
    """Run the loop under these settings, for two optimizer steps."""

    request: TraceRequest
    compares_samples: bool = False
    """Whether the loop as written was seen to compare the samples of its batch."""
    first_look: bool = False
    """Whether the profile of the loop is asked for too: as written, at its own batch size."""
