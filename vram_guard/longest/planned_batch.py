"""The batch that is to be planned for, as settings say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedBatch:
    """The batch that is to be planned for.

    Attributes:
        longest: "largest", "first" (as it was read, without a look), or the share of batches that are no longer.
        seconds: that the look may take.
    """

    longest: float | str = "largest"
    seconds: float = 2.0

    @property
    def share(self) -> float | None:
        """The share of batches that are to be no longer; None: all that are looked at."""
        return None if isinstance(self.longest, str) or self.longest >= 1 else float(self.longest)


#: Where nothing is said.
LARGEST = PlannedBatch()
