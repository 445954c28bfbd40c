"""The batch that is to be planned for, as settings say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedBatch:
    """The batch that is to be planned for.

    Attributes:
        longest: "largest", or "first" (as it was read, without a look).
        seconds: that the look may take.
    """

    longest: str = "largest"
    seconds: float = 2.0


#: Where nothing is said.
LARGEST = PlannedBatch()
