"""The chart: each estimator's answer over the published measurement, or, where there is none, over ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], path: Path) -> None:
    """Two panels: predicted over measured on a logarithmic axis, and the seconds that an answer took.

    Args:
        report: what bench.as_report answered.
        path: the PNG to write; its folder is made.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(report["tools"]) + 2.2), sharey=True)
    tools = list(reversed(report["tools"]))
    for height, tool in enumerate(tools):
        ratios, seconds = _points(report, tool)
        color = "tab:blue" if tool == "vram_guard" else "tab:gray"
        left.scatter(ratios, [height] * len(ratios), color=color, alpha=0.7, zorder=2)
        right.scatter(seconds, [height] * len(seconds), color=color, alpha=0.7, zorder=2)
        if not ratios:
            left.text(1, height, "no answer", ha="center", va="center", color="tab:red", fontsize=8)
    left.axvline(1, color="black", linewidth=0.8, zorder=1)
    left.set(xscale="log", xlabel="predicted / measured peak", yticks=range(len(tools)), yticklabels=tools)
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set(xscale="log", xlabel="seconds for an answer")
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    plt.close(figure)


def _points(report: dict[str, Any], tool: str) -> tuple[list[float], list[float]]:
    """Ratios to the measurement over the measured rows, and seconds over all rows."""
    ratios, seconds = [], []
    for row in report["rows"]:
        answer = row["answers"][tool]
        if answer["predicted"] is None:
            continue
        seconds.append(max(answer["seconds"], 1e-3))
        if row["measured"]:
            ratios.append(answer["predicted"] / row["measured"])
    return ratios, seconds
