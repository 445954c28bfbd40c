"""Ask every estimator about the same training steps, side by side; fills in docs/lab/peers.md and draws its chart.

    python -m benchmarks peers [--json FILE] [--only WORD ...] [--tools NAME ...] [--out DIR]

Each question runs in a worker of its own (harness/workers.py), with a time limit. What a tool cannot answer, and why,
is part of the table. DIR is the repository's ``docs`` unless told otherwise; where a part is asked, nothing is written.
Nothing is downloaded.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import DOCS, GIB, fill, listed, machine
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.statistics import OURS, Errors
from benchmarks.harness.workers import ask
from benchmarks.peers.tools import TOOLS, answer, row_of
from benchmarks.peers.workloads import workloads

#: Seconds for one question, of the wall clock: many times what they take on a machine without other work.
LIMIT = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where vram_guard itself had no answer."""
    parser = arguments_of("peers", __doc__, only="workloads", json="everything")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    options = parser.parse_args(arguments)
    names = chosen(workloads(), options.only)
    results = ask_everything(names, options.tools)
    if options.json:
        write(results, options.json)
    if names == list(workloads()) and options.tools == list(TOOLS):
        draw(results, options.out / "images" / "peers.png")
        write_page(results, options.out)
    return int(any(row.predicted is None for row in results.rows if row.source == OURS))


def ask_everything(names: list[str], tools: list[str], limit: float = LIMIT) -> Results:
    """A row for each workload and tool; one worker at a time, so that the seconds are their own."""
    results = Results(environment=environment())
    for name in names:
        for tool in tools:
            heard = ask(answer, tool, name, limit=limit)
            unanswered = heard.error.strip().rpartition("\n")[2]
            row = Row(**heard.result) if heard.result else row_of(tool, workloads()[name], reason=unanswered)
            results.rows.append(row)
            error = f" {row.error:+.1%}, {row.seconds:.2f} s" if row.measured and row.predicted else ""
            said = f"{row.predicted / GIB:.2f} GiB{error}" if row.predicted is not None else row.reason
            print(f"{name}, {tool}: {said}", file=sys.stderr, flush=True)
    return results


def write_page(results: Results, docs: Path = DOCS) -> None:
    """Fill in the page."""
    tools = dict(results.by_source())
    fill(
        "peers.md",
        {
            "machine": machine(results),
            "answers": _answers(results),
            "seconds": [_seconds(tool, rows) for tool, rows in tools.items()],
            "reasons": listed(_reasons(results)),
        },
        docs,
    )


def _answers(results: Results) -> Iterator[tuple[str, ...]]:
    for title in dict.fromkeys(row.name for row in results.rows):
        rows = [row for row in results.rows if row.name == title]
        measured = f"{rows[0].measured / GIB:.2f} ({rows[0].details['gpu']})" if rows[0].measured else "-"
        yield (title, measured, *(_answer(row) for row in rows))
    yield ("median error on the measured rows", "", *(_median(rows) for _tool, rows in results.by_source()))


def _answer(row: Row) -> str:
    if row.predicted is None:
        return "no answer"
    error = f" ({row.error:+.1%})" if row.measured else ""
    return f"{row.predicted / GIB:.2f}{error}"


def _median(rows: list[Row]) -> str:
    """Of the absolute errors, and over how many of the measured rows."""
    answered = [row.error for row in rows if row.has_peak]
    errors = Errors.of(answered)
    return f"{errors.median:.1%} ({len(answered)}/{sum(row.measured is not None for row in rows)})" if errors else "-"


def _seconds(tool: str, rows: list[Row]) -> tuple[str, ...]:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    times = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
    return (tool, *times, f"{len(seconds)}/{len(rows)}")


def _reasons(results: Results) -> Iterator[str]:
    """Tool and reason, with the steps that it held for; those of one model are counted."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in results.rows:
        if row.predicted is None:
            found.setdefault((row.source, row.reason), Counter())[row.name.split(",")[0]] += 1
    for (tool, why), titles in found.items():
        steps = ", ".join(title if count == 1 else f"{count} x {title}" for title, count in titles.items())
        yield f"{tool}: {why} ({steps})"


def draw(results: Results, path: Path) -> None:
    """Predicted over measured on a logarithmic axis, and the seconds that an answer took, as a PNG.

    Args:
        results: rows whose sources are the tools.
        path: its folder is made.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    tools = dict(reversed(list(results.by_source())))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(tools) + 2.2), sharey=True)
    for height, (tool, rows) in enumerate(tools.items()):
        ratios = [1 + row.error for row in rows if row.has_peak]
        seconds = [max(row.seconds, 1e-3) for row in rows if row.seconds is not None]
        for axis, values in ((left, ratios), (right, seconds)):
            color = "tab:blue" if tool == OURS else "tab:gray"
            axis.scatter(values, [height] * len(values), color=color, alpha=0.7, zorder=2)
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
