"""Seconds of a trace, compared with PyTorch's own MemTracker and bare FakeTensorMode.

Every measurement runs in a worker of its own, on the same model, the same batch and the same AdamW:

- ``vram_guard``: ``trace(step)``, the whole answer: two optimizer steps at two batch sizes, which gives every
  batch size, with category, module and source line of every block, then ``at(batch_size)``.
- ``MemTracker``: ``torch.distributed._tools.mem_tracker.MemTracker`` under FakeTensorMode, used as its docstring
  says. Two optimizer steps (the first has no optimizer state yet) at one batch size.
- ``FakeTensorMode``: the same two steps with nothing recorded: the floor.

Seconds contain building the model and exclude imports, also those that torch does on first use. "first" is the first
call in its process, "again" the second one (what torch sets up on first use is there by then). Because vram_guard runs
more steps than the others, both the ratio of whole answers and the ratio per step are printed. Host memory is the
process's peak resident size after the first call less what it had after its imports.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.mem_tracker import STEPS, run_untracked, tracked_peak
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS, Workload
from vram_guard import trace

GIB = 2**30
CALLS = ("first", "again")
RATIOS = ("faster_than_mem_tracker", "times_bare_fake_tensor_mode")


def main() -> None:
    """Measure everything and print it."""
    parser = arguments_of("bench_trace.py", __doc__, json="everything measured")
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50", "llama7b"], choices=list(WORKLOADS))
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes for each; the fastest counts")
    options = parser.parse_args()
    rows = _measure_all(options.models, options.tools, options.repeat)
    results = Results(rows, environment={**environment(), "repeat": options.repeat, "ratios": _ratios(rows)})
    if options.json:
        write(results, options.json)
    _print_table(rows)
    _print_ratios(results.environment["ratios"])


# --- one measurement, in a worker -----------------------------------------------------------------------------


def measured(tool: str, model: str) -> dict[str, Any]:
    """In a worker: the first and the second call of one tool."""
    workload = WORKLOADS[model]
    workload.prepare()
    _import_everything()
    before = _peak_host_bytes()
    first, (peak, steps) = _timed(TOOLS[tool], workload)
    host_bytes = _peak_host_bytes() - before
    again, _ = _timed(TOOLS[tool], workload)
    details = {"first": first, "again": again, "steps": steps, "host_bytes": host_bytes}
    return asdict(Row(workload.title, tool, None, peak, "", first, details=details))


def _timed(
    run: Callable[[Workload], tuple[int | None, int]], workload: Workload
) -> tuple[float, tuple[int | None, int]]:
    start = time.perf_counter()
    answer = run(workload)
    return time.perf_counter() - start, answer


def _import_everything() -> None:
    """Import, before the clock starts, all that any tool imports; also what torch imports on first use.

    The first ``optimizer.step()`` of any process imports ``torch._dynamo`` (about 0.7 s), a model of transformers has
    done so already: without this the tools and models would be charged for it by chance.
    """
    import torch._dynamo
    import torch._meta_registrations
    import torch._subclasses.fake_tensor
    import torch.distributed._tools.mem_tracker  # noqa: F401

    import vram_guard.simulate.tracing.run  # noqa: F401


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run_vram_guard(workload: Workload) -> tuple[int, int]:
    timeline = trace(workload.step)
    steps = max(phase.step for phase in timeline.phases) * len(timeline.traced)
    return timeline.at(workload.batch_size).peak_allocated, steps


def _run_bare(workload: Workload) -> tuple[None, int]:
    run_untracked(workload)
    return None, STEPS


TOOLS: dict[str, Callable[[Workload], tuple[int | None, int]]] = {
    "vram_guard": _run_vram_guard,
    "MemTracker": lambda workload: (tracked_peak(workload), STEPS),
    "FakeTensorMode": _run_bare,
}


# --- all of them ----------------------------------------------------------------------------------------------


def _measure_all(models: list[str], tools: list[str], repeat: int) -> list[Row]:
    """The fastest of ``repeat`` runs of each; rounds go through all tools, so that a slow minute hits them alike."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for round_ in range(repeat):
        for model in models:
            for tool in tools:
                print(f"round {round_ + 1}/{repeat}: {model}, {tool}", file=sys.stderr, flush=True)
                row = Row(**ask(measured, tool, model, limit=None).checked())
                runs.setdefault((model, tool), []).append(row)
    return [_fastest(same) for same in runs.values()]


def _fastest(runs: list[Row]) -> Row:
    """One row of several runs: the shortest time of each kind of call, and the list of all."""
    every = {call: [run.details[call] for run in runs] for call in CALLS}
    runs[0].details.update({call: min(times) for call, times in every.items()}, every=every)
    return runs[0]


def _ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Per model and kind of call: how many times faster than MemTracker, and how far above the floor."""
    found = []
    for model in dict.fromkeys(row.source for row in rows):
        facts = {row.name: row.details for row in rows if row.source == model}
        for call in CALLS if set(facts) == set(TOOLS) else ():
            ours, tracker, bare = (facts[tool][call] for tool in TOOLS)
            step, tracker_step, bare_step = (facts[tool][call] / facts[tool]["steps"] for tool in TOOLS)
            ratios = (tracker / ours, ours / bare, tracker_step / step, step / bare_step)
            names = (*RATIOS, *(f"{name}_per_step" for name in RATIOS))
            found.append({"title": model, "call": call, **dict(zip(names, ratios, strict=True))})
    return found


def _print_table(rows: list[Row]) -> None:
    columns = f"{'steps':>6}{'first s':>9}{'again s':>9}{'s/step':>8}{'host MiB':>10}{'peak GiB':>10}"
    head = f"{'model':<31}{'tool':<16}{columns}"
    print(head, "-" * len(head), sep="\n")
    for row in rows:
        steps, first, again, host = (row.details[name] for name in ("steps", "first", "again", "host_bytes"))
        peak = "-" if row.predicted is None else f"{row.predicted / GIB:.2f}"
        times = f"{first:>9.2f}{again:>9.2f}{again / steps:>8.2f}"
        print(f"{row.source:<31}{row.name:<16}{steps:>6}{times}{host / 2**20:>10.0f}{peak:>10}")


def _print_ratios(ratios: list[dict[str, Any]]) -> None:
    if not ratios:
        return
    print(f"\n{'':<38}{'faster than MemTracker':>26}{'times bare FakeTensorMode':>28}")
    print(f"{'model':<31}{'call':<7}{'per answer':>14}{'per step':>12}{'per answer':>16}{'per step':>12}")
    for row in ratios:
        faster, bare = ((row[name], row[f"{name}_per_step"]) for name in RATIOS)
        numbers = f"{faster[0]:>13.1f}x{faster[1]:>11.1f}x{bare[0]:>15.2f}x{bare[1]:>11.2f}x"
        print(f"{row['title']:<31}{row['call']:<7}{numbers}")


if __name__ == "__main__":
    main()
