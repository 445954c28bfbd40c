"""How long does planning take? Every technique allowed, a budget far too small for the step as written.

Each plan is made in a fresh process. Seconds contain building the model, all traces and the search; they exclude
imports, also those that torch does on first use. "cpu" is processor time, which other work on the machine hardly
changes. Exits with 1 where a plan takes longer than --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Case of benchmarks/models.py -> the budget that is planned for, and samples of the batch: two or more, so that
#: accumulation is among the techniques.
ASKED = {"gpt2": ("4GiB", 8), "resnet50": ("2GiB", 64), "llama7b": ("24GiB", 4)}
GPU = "A100 80GB"
HOST_BUDGET = "256GiB"
LIMIT = 30.0


def main() -> int:
    """Measure everything and print it; or, as a worker, make one plan and print it as JSON."""
    options = _options()
    if options.worker:
        print(json.dumps(_measure(options.worker)))
        return 0
    results = [_fastest(model, options.repeat) for model in options.models]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print(results)
    return int(any(result["seconds"] > options.limit for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(ASKED), choices=list(ASKED))
    parser.add_argument("--repeat", type=int, default=1, help="fresh processes for each; the fastest counts")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(model: str) -> dict[str, Any]:
    import torch._dynamo  # noqa: F401 - imported by the first optimizer step of any process
    from models import CASES, adamw

    from vram_guard import TrainingStep, plan
    from vram_guard.plan.techniques import TECHNIQUES

    case, (budget, batch_size) = CASES[model], ASKED[model]
    case.prepare()
    step = TrainingStep(model=case.build, batch=case.batch, loss=case.loss, optimizer=adamw)
    said: list[str] = []
    wall, cpu = time.perf_counter(), time.process_time()
    made = plan(step, batch_size, budget, gpu=GPU, allow=TECHNIQUES, host_budget=HOST_BUDGET, progress=_heard_by(said))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "model": model,
        "title": case.title.partition(",")[0],
        "batch_size": batch_size,
        "budget": budget,
        "seconds": wall,
        "cpu_seconds": cpu,
        "traces": sum(line.startswith("tracing") for line in said),
        "fits": made.fits,
        "slowdown": made.slowdown,
        "changes": [list(change) for change in made.changes()],
    }


def _heard_by(said: list[str]) -> Any:
    def hear(line: str) -> None:
        said.append(line)
        print(f"  {line}", file=sys.stderr, flush=True)

    return hear


def _fastest(model: str, repeat: int) -> dict[str, Any]:
    runs = []
    for number in range(repeat):
        print(f"{model}, {number + 1} of {repeat}", file=sys.stderr, flush=True)
        runs.append(_in_fresh_process(model))
    return min(runs, key=lambda run: float(run["seconds"]))


def _in_fresh_process(model: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", model]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _print(results: list[dict[str, Any]]) -> None:
    head = f"{'model':<14}{'batch':>6}{'budget':>8}{'seconds':>9}{'cpu s':>8}{'traces':>8}{'step time':>11}  plan"
    print(head, "-" * len(head), sep="\n")
    for run in results:
        time_ = f"x {run['slowdown']:.2f}" if run["fits"] else "-"
        changes = "; ".join(f"{name}: {after}" for name, _, after in run["changes"]) or "nothing fits"
        print(
            f"{run['title']:<14}{run['batch_size']:>6}{run['budget']:>8}{run['seconds']:>9.1f}{run['cpu_seconds']:>8.1f}"
            f"{run['traces']:>8}{time_:>11}  {changes}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
