"""The task of a copy of a script."""

from __future__ import annotations

from dataclasses import dataclass

from vram_guard.plan.source import TraceRequest
from vram_guard.proof.bodies import Watch


@dataclass(frozen=True)
class ForkTask:
    """Run the loop under these settings, for two optimizer steps."""

    request: TraceRequest
    whole_job: bool = False
    """True if the loop is followed beyond its second step: evaluation, saving, the next epoch."""
    watch: Watch | None = None
    """What is looked at in each forward of the loop; None: nothing."""
