"""The share of the budget that is left free by default: a quantile of measured errors, by the tier that answered.

``margins.json`` is generated, never edited: ``python -m benchmarks.gpu.margin --write FILE ...`` makes it from measured
peaks and the predictions for them, and writes where they come from beside the numbers. docs/en/accuracy.md says how the
quantile is chosen.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from vram_guard.language import _

#: The tier that is meant where none is known yet.
USUAL_TIER = "symbolic"


class MeasuredMargin(NamedTuple):
    """The margin that the measured errors of one tier ask for."""

    tier: str
    """The tier whose rows it comes from: another one's where a tier has too few rows of its own."""
    fraction: float
    """Of the available memory, to leave free."""
    quantile: float
    """The share of the measured runs for which this was enough."""
    rows: int
    made: str
    """Date of the predictions, ISO."""

    @property
    def source(self) -> str:
        """In one line: what the number is."""
        return _(
            "enough for {share} of {count} measured runs: {tier}, {date}",
            share=f"{self.quantile:.0%}",
            count=self.rows,
            tier=self.tier,
            date=self.made,
        )


@cache
def margins() -> dict[str, MeasuredMargin]:
    """Tier -> its margin; every tier that may promise something is there."""
    data = json.loads(files("vram_guard.budget").joinpath("margins.json").read_text(encoding="utf-8"))
    return {
        tier: MeasuredMargin(entry["tier"], entry["margin"], entry["quantile"], entry["rows"], data["made"])
        for tier, entry in data["tiers"].items()
    }


def measured_margin(tier: str = USUAL_TIER) -> MeasuredMargin:
    """The margin of a tier; the usual one's for a tier that never promises that a step fits ("formula")."""
    found = margins()
    return found.get(tier, found[USUAL_TIER])
