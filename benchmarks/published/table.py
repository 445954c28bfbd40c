"""The one table of this folder: errors and wrong verdicts, tool by tool."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(
    title: str,
    errors: Mapping[str, Sequence[float]],
    wrong: Mapping[str, Sequence[bool]] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> None:
    """Print one block.

    Args:
        title: what the rows are.
        errors: tool -> signed relative errors of its rows.
        wrong: tool -> for each row with a verdict, whether the verdict was wrong.
        seconds: tool -> mean seconds for one estimate, where they are known.
    """
    print(f"\n{title}")
    print(f"{'tool':12} {'rows':>5} {'median':>8} {'p90':>8} {'bias':>8} {'wrong verdicts':>16} {'s/estimate':>11}")
    for tool, values in errors.items():
        if not values:
            continue
        absolute = [abs(value) for value in values]
        verdicts = (wrong or {}).get(tool, ())
        bad = f"{sum(verdicts)}/{len(verdicts)} {sum(verdicts) / len(verdicts):.1%}" if verdicts else "-"
        took = f"{seconds[tool]:.2f}" if seconds and tool in seconds else "-"
        print(
            f"{tool:12} {len(values):5} {statistics.median(absolute):8.2%} {quantile(absolute, 0.9):8.2%}"
            f" {statistics.median(values):+8.2%} {bad:>16} {took:>11}"
        )
