"""Seconds of planning: every technique allowed, a budget far too small for the step as written.

Each plan is made in a worker of its own. Seconds contain building the model, all traces and the search; they exclude
imports, also those that torch does on first use. "cpu" is processor time, which other work on the machine hardly
changes. Exits with 1 where a plan takes longer than --limit.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS
from vram_guard import plan
from vram_guard.plan.techniques import TECHNIQUES

#: Workload -> the budget that is planned for, and samples of the batch: two or more, so that accumulation is among the
#: techniques.
ASKED = {"gpt2": ("4GiB", 8), "resnet50": ("2GiB", 64), "llama7b": ("24GiB", 4)}
GPU = "A100 80GB"
HOST_BUDGET = "256GiB"
LIMIT = 30.0


def main() -> int:
    """Measure everything and print it."""
    parser = arguments_of("bench_plan.py", __doc__, json="everything measured")
    parser.add_argument("--models", nargs="+", default=list(ASKED), choices=list(ASKED))
    parser.add_argument("--repeat", type=int, default=1, help="fresh processes for each; the fastest counts")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    results = Results(environment=environment())
    for model in options.models:
        runs = []
        for number in range(options.repeat):
            print(f"{model}, {number + 1} of {options.repeat}", file=sys.stderr, flush=True)
            runs.append(Row(**ask(planned, model, limit=None).checked()))
        results.rows.append(min(runs, key=lambda row: row.seconds or 0.0))
    if options.json:
        write(results, options.json)
    _print(results.rows)
    return int(any((row.seconds or 0.0) > options.limit for row in results.rows))


def planned(model: str) -> dict[str, Any]:
    """In a worker: one plan."""
    workload, (budget, size) = WORKLOADS[model], ASKED[model]
    workload.prepare()
    said: list[str] = []

    def heard(line: str) -> None:
        said.append(line)
        print(f"  {line}", file=sys.stderr, flush=True)

    wall, cpu = time.perf_counter(), time.process_time()
    made = plan(workload.step, size, budget, gpu=GPU, allow=TECHNIQUES, host_budget=HOST_BUDGET, progress=heard)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    details = {
        "batch_size": size,
        "cpu_seconds": cpu,
        "traces": sum(line.startswith("tracing") for line in said),
        "slowdown": made.slowdown,
        "changes": [list(change) for change in made.changes()],
    }
    title = workload.title.partition(",")[0]
    row = Row(title, budget, None, made.peak, made.estimate.tier, wall, fits=made.fits, details=details)
    return asdict(row)


def _print(rows: list[Row]) -> None:
    head = f"{'model':<14}{'batch':>6}{'budget':>8}{'seconds':>9}{'cpu s':>8}{'traces':>8}{'step time':>11}  plan"
    print(head, "-" * len(head), sep="\n")
    for row in rows:
        facts = row.details
        time_ = f"x {facts['slowdown']:.2f}" if row.fits else "-"
        changes = "; ".join(f"{name}: {after}" for name, _, after in facts["changes"]) or "nothing fits"
        print(
            f"{row.source:<14}{facts['batch_size']:>6}{row.name:>8}{row.seconds:>9.1f}{facts['cpu_seconds']:>8.1f}"
            f"{facts['traces']:>8}{time_:>11}  {changes}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
