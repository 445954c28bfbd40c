"""Ask every estimator about the same training steps, side by side, and write the table, the chart and the pages.

    python -m benchmarks.peers.bench [--out DIR] [--json FILE] [--only WORD ...] [--tools NAME ...]

Each question runs in a fresh process (a fork of one that has imported torch and transformers), with a time limit. What
a tool cannot answer, and why, is part of the table. The pages go to DIR/en and DIR/zh_cn, the chart to DIR/images;
DIR is the repository's ``docs`` unless told otherwise. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.chart import draw
from benchmarks.peers.pages import write_pages
from benchmarks.peers.tools import TOOLS, ask
from benchmarks.peers.workloads import workloads

DOCS = Path(__file__).parents[2] / "docs"

#: Seconds for one question.
LIMIT = 120.0

GIB = 2**30

PRELOADED = ["torch", "transformers.models.gpt2.modeling_gpt2", "benchmarks.peers.tools"]

Answers = dict[tuple[str, str], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where vram_guard itself had no answer."""
    options = _options(arguments)
    steps = {name: w for name, w in workloads().items() if not options.only or any(o in name for o in options.only)}
    if not steps:
        print(f"no workload contains {' or '.join(options.only)}", file=sys.stderr)
        return 2
    answers = ask_everything(list(steps), options.tools)
    report = as_report(steps, options.tools, answers)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(report)
    draw(report, options.out / "images" / "peers.png")
    for page in write_pages(report, options.out):
        print(page)
    return int(any(answers["vram_guard", name]["predicted"] is None for name in steps if "vram_guard" in options.tools))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only workloads whose names contain one")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    return parser.parse_args(arguments)


def ask_everything(steps: list[str], tools: list[str], limit: float = LIMIT) -> Answers:
    """(tool, workload) -> its row; one process at a time, so that the seconds are their own."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"})
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    answers: Answers = {}
    for step in steps:
        for tool in tools:
            with context.Pool(1, maxtasksperchild=1) as pool:
                try:
                    row = pool.apply_async(ask, (tool, step)).get(limit)
                except multiprocessing.TimeoutError:
                    row = {"tool": tool, "workload": step, "predicted": None, "seconds": None}
                    row["why"] = f"no answer within {limit:g} s"
            answers[tool, step] = row
            said = f"{row['predicted'] / GIB:.2f} GiB" if row["predicted"] is not None else row["why"]
            print(f"{step}, {tool}: {said}", file=sys.stderr, flush=True)
    return answers


def as_report(steps: dict[str, Any], tools: list[str], answers: Answers) -> dict[str, Any]:
    """Everything that the table, the chart and the pages show."""
    import torch

    rows = []
    for name, step in steps.items():
        measured = step.measured
        row = {
            "workload": name,
            "title": step.title,
            "measured": measured.peak if measured else None,
            "gpu": measured.gpu if measured else None,
        }
        rows.append({**row, "answers": {tool: answers[tool, name] for tool in tools}})
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    return {"machine": machine, "tools": tools, "rows": rows}


def print_table(report: dict[str, Any]) -> None:
    """Predicted GiB, the error where a measurement is published, and the seconds it took."""
    for row in report["rows"]:
        measured = f"measured {row['measured'] / GIB:.2f} GiB on {row['gpu']}" if row["measured"] else "not measured"
        print(f"\n{row['title']}: {measured}")
        for tool, answer in row["answers"].items():
            if answer["predicted"] is None:
                print(f"  {tool:18}{'-':>9}            {'':>9}  {answer['why']}")
                continue
            error = f"{answer['predicted'] / row['measured'] - 1:+9.1%}" if row["measured"] else f"{'':>9}"
            print(f"  {tool:18}{answer['predicted'] / GIB:>9.2f} GiB{error}{answer['seconds']:>10.2f} s")


if __name__ == "__main__":
    raise SystemExit(main())
