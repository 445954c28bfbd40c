"""The chart: each estimator's answer over the published measurement, and its seconds."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.records import Results, Row
from benchmarks.harness.statistics import OURS


def draw(results: Results, path: Path) -> None:
    """Two panels: predicted over measured on a logarithmic axis, and the seconds that an answer took.

    Args:
        results: rows whose sources are the tools.
        path: the PNG to write; its folder is made.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    tools = dict(reversed(list(results.by_source())))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(tools) + 2.2), sharey=True)
    for height, (tool, rows) in enumerate(tools.items()):
        ratios, seconds = _points(rows)
        color = "tab:blue" if tool == OURS else "tab:gray"
        left.scatter(ratios, [height] * len(ratios), color=color, alpha=0.7, zorder=2)
        right.scatter(seconds, [height] * len(seconds), color=color, alpha=0.7, zorder=2)
        if not ratios:
            left.text(1, height, "no answer", ha="center", va="center", color="tab:red", fontsize=8)
    left.axvline(1, color="black", linewidth=0.8, zorder=1)
    left.set(xscale="log", xlabel="predicted / measured peak", yticks=range(len(tools)), yticklabels=list(tools))
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set(xscale="log", xlabel="processor seconds for an answer")
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    plt.close(figure)


def _points(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Ratios to the measurement over the measured rows, and seconds over all rows."""
    return (
        [1 + row.error for row in rows if row.has_peak],
        [max(row.seconds, 1e-3) for row in rows if row.seconds is not None],
    )
