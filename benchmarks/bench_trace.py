"""How fast is a trace, beside PyTorch's own MemTracker and beside bare FakeTensorMode?

Every measurement runs in a fresh process, on the same model, the same batch and the same AdamW:

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

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 2**30
CALLS = ("first", "again")
TOOLS = ("vram_guard", "MemTracker", "FakeTensorMode")
STEPS = 2


def main() -> None:
    """Measure everything and print it; or, as a worker, measure one thing and print it as JSON."""
    options = _options()
    if options.worker:
        print(json.dumps(_measure(*options.worker)))
        return
    results = _measure_all(options.models, options.tools, options.repeat)
    report = {"machine": _machine(), "repeat": options.repeat, "results": results, "ratios": _ratios(results)}
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print_table(results)
    _print_ratios(report["ratios"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50", "llama7b"])
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes for each; the fastest counts")
    parser.add_argument("--json", metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--worker", nargs=2, metavar=("TOOL", "MODEL"), help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one measurement, in a process of its own -----------------------------------------------------------------


def _measure(tool: str, model: str) -> dict[str, Any]:
    from models import CASES

    case = CASES[model]
    run = {"vram_guard": _run_vram_guard, "MemTracker": _run_mem_tracker, "FakeTensorMode": _run_bare}[tool]
    case.prepare()
    _import_everything()
    before = _peak_host_bytes()
    first, (peak, steps) = _timed(run, case)
    host_bytes = _peak_host_bytes() - before
    again, _ = _timed(run, case)
    return {
        "model": model,
        "title": case.title,
        "tool": tool,
        "first": first,
        "again": again,
        "steps": steps,
        "host_bytes": host_bytes,
        "predicted_peak_bytes": peak,
    }


def _timed(run: Callable[[Any], tuple[int | None, int]], case: Any) -> tuple[float, tuple[int | None, int]]:
    start = time.perf_counter()
    answer = run(case)
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

    import vram_guard

    vram_guard.trace  # noqa: B018 - public names are imported on first use


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run_vram_guard(case: Any) -> tuple[int, int]:
    from models import adamw

    from vram_guard import TrainingStep, trace

    timeline = trace(TrainingStep(model=case.build, batch=case.batch, loss=case.loss, optimizer=adamw))
    steps = max(phase.step for phase in timeline.phases) * len(timeline.traced)
    return timeline.at(case.batch_size).peak_allocated, steps


def _run_mem_tracker(case: Any) -> tuple[int, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, batch, optimizer = _made(case)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()  # it refuses a second iteration otherwise
                _step(case, model, batch, optimizer)
    peaks = tracker.get_tracker_snapshot("peak")
    return sum(device["Total"] for device in peaks.values()), STEPS


def _run_bare(case: Any) -> tuple[None, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, batch, optimizer = _made(case)
        for _ in range(STEPS):
            _step(case, model, batch, optimizer)
    return None, STEPS


def _made(case: Any) -> tuple[Any, Any, Any]:
    from models import adamw

    model = case.build().train()
    return model, case.batch(case.batch_size), adamw(model.parameters())


def _step(case: Any, model: Any, batch: Any, optimizer: Any) -> None:
    case.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- all of them ----------------------------------------------------------------------------------------------


def _measure_all(models: list[str], tools: list[str], repeat: int) -> list[dict[str, Any]]:
    """The fastest of ``repeat`` runs of each; rounds go through all tools, so that a slow minute hits them alike."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for round_ in range(repeat):
        for model in models:
            for tool in tools:
                print(f"round {round_ + 1}/{repeat}: {model}, {tool}", file=sys.stderr, flush=True)
                runs.setdefault((model, tool), []).append(_in_fresh_process(tool, model))
    return [_fastest(same) for same in runs.values()]


def _fastest(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several runs: the shortest time of each kind of call, and all of them beside."""
    every = {call: [run[call] for run in runs] for call in CALLS}
    return {**runs[0], **{call: min(times) for call, times in every.items()}, "every": every}


def _in_fresh_process(tool: str, model: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", tool, model]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and kind of call: how many times faster than MemTracker, and how far above the floor."""
    by_key = {(run["model"], run["tool"]): run for run in results}
    complete = [
        [by_key[model, tool] for tool in TOOLS]
        for model in dict.fromkeys(run["model"] for run in results)
        if all((model, tool) in by_key for tool in TOOLS)
    ]
    return [_ratio(call, *runs) for runs in complete for call in CALLS]


def _ratio(call: str, ours: dict[str, Any], tracker: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    per_step = {run["tool"]: run[call] / run["steps"] for run in (ours, tracker, bare)}
    return {
        "model": ours["model"],
        "title": ours["title"],
        "call": call,
        "faster_than_mem_tracker": tracker[call] / ours[call],
        "faster_than_mem_tracker_per_step": per_step["MemTracker"] / per_step["vram_guard"],
        "times_bare_fake_tensor_mode": ours[call] / bare[call],
        "times_bare_fake_tensor_mode_per_step": per_step["vram_guard"] / per_step["FakeTensorMode"],
    }


def _machine() -> dict[str, str | int | None]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}


def _print_table(results: list[dict[str, Any]]) -> None:
    columns = f"{'steps':>6}{'first s':>9}{'again s':>9}{'s/step':>8}{'host MiB':>10}{'peak GiB':>10}"
    head = f"{'model':<31}{'tool':<16}{columns}"
    print(head, "-" * len(head), sep="\n")
    for run in results:
        peak = run["predicted_peak_bytes"]
        print(
            f"{run['title']:<31}{run['tool']:<16}{run['steps']:>6}{run['first']:>9.2f}{run['again']:>9.2f}"
            f"{run['again'] / run['steps']:>8.2f}{run['host_bytes'] / 2**20:>10.0f}"
            f"{'-' if peak is None else f'{peak / GIB:.2f}':>10}"
        )


def _print_ratios(ratios: list[dict[str, Any]]) -> None:
    if not ratios:
        return
    print(f"\n{'':<38}{'faster than MemTracker':>26}{'times bare FakeTensorMode':>28}")
    print(f"{'model':<31}{'call':<7}{'per answer':>14}{'per step':>12}{'per answer':>16}{'per step':>12}")
    for row in ratios:
        print(
            f"{row['title']:<31}{row['call']:<7}{row['faster_than_mem_tracker']:>13.1f}x"
            f"{row['faster_than_mem_tracker_per_step']:>11.1f}x"
            f"{row['times_bare_fake_tensor_mode']:>15.2f}x{row['times_bare_fake_tensor_mode_per_step']:>11.2f}x"
        )


if __name__ == "__main__":
    main()
