"""What is planned for large models on small budgets, and what halving the batch until it fits would have done.

    python -m benchmarks.plans [--json FILE] [--only WORD ...] [--budgets AMOUNT ...] [--gpu NAME] [--out DIR]

Prints the table and writes the pages DIR/en/plans.md and DIR/zh_cn/plans.md (DIR is the repository's ``docs`` unless
told otherwise). Each training is planned in a process of its own, built symbolically: it takes no GPU, no weights and
no download, and host memory only for the trace. Seconds exclude imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.plans.pages import write_pages

ROOT = Path(__file__).parents[2]
BUDGETS = ["8GiB", "12GiB", "16GiB", "24GiB", "40GiB", "80GiB"]
#: One card for all budgets, so that only the budget differs from row to row.
GPU = "A100 80GB"
GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Plan everything, print and write; the exit status is 1 where a training could not be planned for."""
    from benchmarks.plans.workloads import WORKLOADS

    options = _options(arguments)
    chosen = [name for name in WORKLOADS if not options.only or any(word in name for word in options.only)]
    if not chosen:
        print(f"no training contains {' or '.join(options.only)}; there are {', '.join(WORKLOADS)}", file=sys.stderr)
        return 2
    if options.worker:
        _work(chosen[0], options)
        return 0
    report = plan_everything(chosen, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_tables(report)
    for page in write_pages(report, options.out):
        print(page)
    return int(bool(report["failed"]))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.plans", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only trainings whose names contain one")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, metavar="AMOUNT")
    parser.add_argument("--gpu", default=GPU, help="the card whose speed and kernels count (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def plan_everything(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the tables and the pages show."""
    from benchmarks.plans.workloads import WORKLOADS

    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in names:
        missing = [package for package in WORKLOADS[name].needs if find_spec(package) is None]
        if missing:
            failed[name] = f"not installed: pip install {' '.join(missing)}"
            continue
        found, why = _in_fresh_process(name, options)
        rows += found
        if why:
            failed[name] = why
    import torch

    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    return {"machine": machine, "gpu": options.gpu, "rows": rows, "failed": failed}


def _in_fresh_process(name: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """The rows of one training, and what went wrong ("" where nothing)."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plans", "--worker", "--only", name]
    command += ["--gpu", options.gpu, "--budgets", *options.budgets]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **quiet, "PYTHONPATH": paths}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows, f"ended with exit code {done.returncode}" if done.returncode else ""


def _work(name: str, options: argparse.Namespace) -> None:
    """One training: a line of JSON for each budget, progress on standard error."""
    import torch._dynamo  # noqa: F401 - imported by the first optimizer step of any process; not planning time

    from benchmarks.plans.compare import rows
    from benchmarks.plans.workloads import WORKLOADS

    workload = WORKLOADS[name]

    def say(line: str) -> None:
        print(f"{name}, {line}", file=sys.stderr, flush=True)

    workload.prepare()
    for row in rows(name, workload, options.budgets, options.gpu, say):
        print(json.dumps(row), flush=True)


def print_tables(report: dict[str, Any]) -> None:
    """One table for each training."""
    for title in dict.fromkeys(row["title"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["title"] == title]
        print(f"\n{title}: {rows[0]['as_written'] / GIB:.2f} GiB as written")
        print(f"  {'budget':>8}{'peak GiB':>10}{'step time':>11}{'planned in':>12}  {'halved':<16} plan")
        for row in rows:
            time = f"x {row['slowdown']:.2f}" if row["fits"] and row["slowdown"] is not None else "-"
            peak = f"{row['peak'] / GIB:.2f}"
            seconds = f"{row['seconds']:.1f} s"
            print(f"  {row['budget']:>8}{peak:>10}{time:>11}{seconds:>12}  {_halved(row):<16} {row['plan']}")
    for name, why in report["failed"].items():
        print(f"\n{name}: {why}")


def _halved(row: dict[str, Any]) -> str:
    half = row["halving"]
    return "fails" if half is None else f"{half['batch_size']} (x {half['slowdown']:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
