"""How fast is a trace, beside PyTorch's own MemTracker and beside bare FakeTensorMode?

Every measurement runs in a fresh process, on the same model, the same batch and the same AdamW:

- ``vram_guard``: ``trace(step)``, the whole answer: two optimizer steps at two batch sizes, which gives every
  batch size, with category, module and source line of every block, then ``at(batch_size)``.
- ``MemTracker``: ``torch.distributed._tools.mem_tracker.MemTracker`` under FakeTensorMode, used as its docstring
  says. Two optimizer steps (the first has no optimizer state yet) at one batch size.
- ``FakeTensorMode``: the same two steps with nothing recorded: the floor.

Seconds contain building the model and exclude imports. Because vram_guard runs more steps than the others, both
the ratio of whole answers and the ratio per step are printed. Host memory is the process's peak resident size less
what it had after its imports.
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
from pathlib import Path
from typing import Any

GIB = 2**30
TOOLS = ("vram_guard", "MemTracker", "FakeTensorMode")
STEPS = 2


def main() -> None:
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
    _import_what_the_tool_imports(tool)
    before = _peak_host_bytes()
    start = time.perf_counter()
    peak, steps = run(case)
    seconds = time.perf_counter() - start
    return {
        "model": model,
        "title": case.title,
        "tool": tool,
        "seconds": seconds,
        "steps": steps,
        "host_bytes": _peak_host_bytes() - before,
        "predicted_peak_bytes": peak,
    }


def _import_what_the_tool_imports(tool: str) -> None:
    if tool == "vram_guard":
        import vram_guard

        vram_guard.trace  # noqa: B018 - the import happens on first use
    else:
        import torch._subclasses.fake_tensor
        import torch.distributed._tools.mem_tracker  # noqa: F401


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
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for round_ in range(repeat):
        for model in models:
            for tool in tools:
                print(f"round {round_ + 1}/{repeat}: {model}, {tool}", file=sys.stderr, flush=True)
                run = _in_fresh_process(tool, model)
                best = fastest.get((model, tool))
                seconds = [*(best["all_seconds"] if best else ()), run["seconds"]]
                keep = run if best is None or run["seconds"] < best["seconds"] else best
                fastest[model, tool] = {**keep, "all_seconds": seconds}
    return list(fastest.values())


def _in_fresh_process(tool: str, model: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", tool, model]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model: how many times faster than MemTracker, and how far above the floor."""
    by_key = {(run["model"], run["tool"]): run for run in results}
    ratios = []
    for model in dict.fromkeys(run["model"] for run in results):
        runs = [by_key.get((model, tool)) for tool in TOOLS]
        if any(run is None for run in runs):
            continue
        ours, tracker, bare = (run for run in runs if run is not None)
        ratios.append(
            {
                "model": model,
                "title": ours["title"],
                "faster_than_mem_tracker": tracker["seconds"] / ours["seconds"],
                "faster_than_mem_tracker_per_step": _per_step(tracker) / _per_step(ours),
                "times_bare_fake_tensor_mode": ours["seconds"] / bare["seconds"],
                "times_bare_fake_tensor_mode_per_step": _per_step(ours) / _per_step(bare),
            }
        )
    return ratios


def _per_step(run: dict[str, Any]) -> float:
    return float(run["seconds"]) / int(run["steps"])


def _machine() -> dict[str, str | int | None]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}


def _print_table(results: list[dict[str, Any]]) -> None:
    head = f"{'model':<31}{'tool':<16}{'steps':>6}{'seconds':>9}{'s/step':>8}{'host MiB':>10}{'peak GiB':>10}"
    print(head, "-" * len(head), sep="\n")
    for run in results:
        peak = run["predicted_peak_bytes"]
        print(
            f"{run['title']:<31}{run['tool']:<16}{run['steps']:>6}{run['seconds']:>9.2f}{_per_step(run):>8.2f}"
            f"{run['host_bytes'] / 2**20:>10.0f}{'-' if peak is None else f'{peak / GIB:.2f}':>10}"
        )


def _print_ratios(ratios: list[dict[str, Any]]) -> None:
    if not ratios:
        return
    print(f"\n{'':<31}{'faster than MemTracker':>26}{'times bare FakeTensorMode':>28}")
    print(f"{'model':<31}{'per answer':>14}{'per step':>12}{'per answer':>16}{'per step':>12}")
    for row in ratios:
        print(
            f"{row['title']:<31}{row['faster_than_mem_tracker']:>13.1f}x"
            f"{row['faster_than_mem_tracker_per_step']:>11.1f}x"
            f"{row['times_bare_fake_tensor_mode']:>15.2f}x{row['times_bare_fake_tensor_mode_per_step']:>11.2f}x"
        )


if __name__ == "__main__":
    main()
