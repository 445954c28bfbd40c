"""The share of the budget that is left free by default: a quantile of measured errors, by tier and kind of network.

``margins.json`` is generated, never edited: ``python -m benchmarks margin --write FILE ...`` makes it from measured
peaks and the predictions for them, and writes where they come from beside the numbers. docs/lab/accuracy.md says how
the quantile is chosen.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple, get_args

from vram_guard.language import _, marked

#: The kinds of networks whose margins are measured apart, told by the operators of the step: whether convolutions do a
#: part of its matrix products that counts, and what most of those compute in.
Network = Literal[
    "convolutions in float32",
    "convolutions in half precision",
    "no convolutions, float32",
    "no convolutions, half precision",
]
NETWORKS: tuple[Network, ...] = get_args(Network)

#: The tier that is meant where none is known yet.
USUAL_TIER = "symbolic"

#: The rows that a margin comes from, where they are not those of one kind of network.
ALL_NETWORKS, ALL_ROWS = "all networks", "all rows"

_GROUPS = {
    "convolutions in float32": marked("convolutional networks in float32"),
    "convolutions in half precision": marked("convolutional networks in half precision"),
    "no convolutions, float32": marked("networks without convolutions (transformers) in float32"),
    "no convolutions, half precision": marked("networks without convolutions (transformers) in half precision"),
    ALL_NETWORKS: marked("networks of all kinds"),
    ALL_ROWS: marked("networks of all kinds and all tiers"),
}


class MeasuredMargin(NamedTuple):
    """The margin that the measured errors of a group of rows ask for."""

    group: str
    """The rows' kind of network; :data:`ALL_NETWORKS` (of the tier) or :data:`ALL_ROWS` where that kind, or that tier,
    has too few rows."""
    fraction: float
    """Of the available memory, to leave free."""
    quantile: float
    """The share of the measured runs for which this was enough."""
    rows: int
    rarely: float
    """The share of what they took by which the predictions of 99% of these runs were too low at most."""
    made: str
    """Date of the predictions, ISO."""

    @property
    def source(self) -> str:
        """In one line: what the number is."""
        return _(
            "enough for {share} of {count} measured runs of {group}, {date}",
            share=f"{self.quantile:.0%}",
            count=self.rows,
            group=_(_GROUPS[self.group]),
            date=self.made,
        )


@cache
def margins() -> dict[tuple[str, str | None], MeasuredMargin]:
    """(Tier, kind of network; None: not known) -> its margin; every tier that may promise something is there."""
    data = json.loads(files("vram_guard.budget").joinpath("margins.json").read_text(encoding="utf-8"))
    return {
        (entry["tier"], entry["network"]): MeasuredMargin(
            *(entry["group"], entry["margin"], entry["quantile"], entry["rows"]),
            entry["shortfalls"]["0.99"],
            data["made"],
        )
        for entry in data["margins"]
    }


def measured_margin(tier: str = USUAL_TIER, network: str | None = None) -> MeasuredMargin:
    """The margin of a tier and a kind of network; the usual tier's for one that never promises that a step fits."""
    found = margins()
    return found.get((tier, network)) or found.get((tier, None)) or found[USUAL_TIER, None]
