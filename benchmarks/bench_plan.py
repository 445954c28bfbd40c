"""Seconds of planning: every technique allowed, a budget far too small for the step as written.

Each plan is made in a worker of its own. Seconds contain building the model, all traces and the search; they exclude
imports, also those that torch does on first use. "cpu" is processor time, which other work on the machine hardly
changes. Exits with 1 where a plan takes longer than --limit.

Then two curves of GPT-2 medium: the largest batch on each GPU of the catalogue as written, and the plan for each of
several budgets of one card, with the processor time of each.
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
from vram_guard import Timeline, plan, trace
from vram_guard.budget.catalogue import catalogue
from vram_guard.plan.every_gpu import on_every_gpu
from vram_guard.plan.per_budget import plans_per_budget
from vram_guard.plan.techniques import TECHNIQUES

#: Workload -> the budget that is planned for, and samples of the batch: two or more, so that accumulation is among the
#: techniques.
ASKED = {"gpt2": ("4GiB", 8), "resnet50": ("2GiB", 64), "llama7b": ("24GiB", 4)}
GPU = "A100 80GB"
HOST_BUDGET = "256GiB"
LIMIT = 30.0

#: Of the curves: the training, and the parts of the card that it is planned for.
CURVES_OF = "gpt2-medium"
BUDGETS = ("8GiB", "12GiB", "16GiB", "24GiB", "40GiB", "80GiB")


def main() -> int:
    """Measure everything and print it."""
    parser = arguments_of("bench_plan.py", __doc__, json="everything measured")
    parser.add_argument("--models", nargs="+", default=list(ASKED), choices=list(ASKED))
    parser.add_argument("--repeat", type=int, default=1, help="fresh processes for each; the fastest counts")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default: %(default)s)")
    parser.add_argument("--no-curves", dest="curves", action="store_false", help="plans alone")
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
    if options.curves:
        print_curves(ask(curves, CURVES_OF, limit=None).checked())
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


def curves(model: str) -> dict[str, Any]:
    """In a worker: both curves of one training, each with what it took. Seconds are of processor time."""
    workload = WORKLOADS[model]
    workload.prepare()

    def traced(capability: tuple[int, int]) -> Timeline:
        return trace(workload.step, compute_capability=capability)

    began = time.process_time()
    batches = [(one.gpu.name, one.largest_batch) for one in on_every_gpu(traced, catalogue())]
    between = time.process_time()
    plans = plans_per_budget(workload.step, workload.batch_size, BUDGETS, gpu=GPU, host_budget=HOST_BUDGET)
    return {
        "title": workload.title,
        "batches": batches,
        "batch_seconds": between - began,
        "plans": [(one.name, one.words) for one in plans],
        "plan_seconds": time.process_time() - between,
    }


def print_curves(found: dict[str, Any]) -> None:
    """Both curves, a line for each batch and for each plan."""
    cards: dict[int, list[str]] = {}
    for name, batch in found["batches"]:
        cards.setdefault(batch, []).append(name)
    print(f"\n{found['title']}: the largest batch of {len(found['batches'])} GPUs, {found['batch_seconds']:.1f} cpu s")
    for batch, names in sorted(cards.items()):
        print(f"{batch:>8}  {', '.join(names)}")
    print(f"\nthe plan for {len(found['plans'])} budgets, {found['plan_seconds']:.1f} cpu s")
    for name, words in found["plans"]:
        print(f"{name:>8}  {words}")


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
