"""Seconds of our own answers: a trace beside PyTorch's tools, a plan, a proof, and what the guard adds to an iteration.

    python -m benchmarks speed [trace | plan | proof | iteration ...] [--json FILE]

Every measurement but that of iterations runs in a worker of its own. Seconds contain building the model and exclude
imports, also those that torch does on first use; "cpu" is processor time, which other work on the machine hardly
changes. The exit status is 1 where a plan, a proof or the share of an iteration is above its limit.

- trace: ``vram_guard`` is the whole answer, two optimizer steps at two batch sizes, which gives every batch size;
  ``MemTracker`` (used as its docstring says) and ``FakeTensorMode`` (nothing recorded: the floor) run two steps at one
  size. So both the ratio of whole answers and the ratio per step are printed. "first" is the first call in its process,
  "again" the second. Host memory is the peak resident size after the first call less what it was after the imports.
- plan: every technique is allowed, and the budget is far too small for the step as written.
- proof: "here" is a plan of two micro-batches made in the process, "copy" the same in a forked copy, as the guard does
  it; "proof" comes on top, also in a copy: the graph of the loss. "memory" is the most that a process of it held.
- iteration: an MMEngine training whose step is almost nothing, without and with the guard, beside one of the
  bird's-eye view example on this CPU.
"""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.mem_tracker import STEPS, run_untracked, tracked_peak
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS, Workload
from vram_guard import plan, trace
from vram_guard.plan import PlanOptions
from vram_guard.plan.techniques import TECHNIQUES
from vram_guard.units import format_bytes

GIB = 2**30
MODELS = ("gpt2", "resnet50", "llama7b")
#: Fresh processes for each tool and model; the fastest counts.
REPEATED = 3

#: Workload -> the budget that is planned for, and samples of the batch: two or more, so that accumulation is among the
#: techniques.
PLANNED = {"gpt2": ("4GiB", 8), "resnet50": ("2GiB", 64), "llama7b": ("24GiB", 4)}
LONGEST_PLAN = 30.0

PROVED = ("resnet50", "gpt2", "vit-large")
#: Samples of a batch, and of the data set: more than the proof runs, and few enough to be made quickly.
BATCH, SAMPLES = 8, 16
#: Enough for the step as written: two micro-batches are pinned, so that no search is in the seconds.
ENOUGH = "75GiB"
LONGEST_PROOF = 20.0

EXAMPLE = Path(__file__).parents[1] / "examples" / "mmengine_bev"
ITERATIONS, ROUNDS = 1000, 5
GUARDS: dict[str, dict[str, Any]] = {
    "no guard": {},
    "guard": {"budget": "8GiB", "margin": 0},
    "guard, recover=True": {"budget": "8GiB", "margin": 0, "recover": True},
}
#: Of a real iteration.
LARGEST_SHARE = 0.001


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = arguments_of("speed", __doc__, json="everything measured")
    parser.add_argument("what", nargs="*", choices=[*PARTS, []], help=f"{', '.join(PARTS)}; without any: all")
    options = parser.parse_args(arguments)
    results = Results(environment=environment())
    failed = [name for name in options.what or PARTS if not PARTS[name](results.rows)]
    if options.json:
        write(results, options.json)
    return int(bool(failed))


# --- a trace --------------------------------------------------------------------------------------------------


def traces(rows: list[Row]) -> bool:
    """Measure each tool on each model; rounds go through all tools, so that a slow minute hits them alike."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for _ in range(REPEATED):
        for model in MODELS:
            for tool in TOOLS:
                runs.setdefault((model, tool), []).append(Row(**ask(traced, tool, model, limit=None).checked()))
    columns = f"{'steps':>6}{'first s':>9}{'again s':>9}{'s/step':>8}{'host MiB':>10}{'peak GiB':>10}"
    head = f"{'model':<31}{'tool':<16}{columns}"
    print(head, "-" * len(head), sep="\n")
    for same in runs.values():
        row = same[0]
        row.details.update({call: min(run.details[call] for run in same) for call in ("first", "again")})
        rows.append(row)
        steps, first, again, host = (row.details[name] for name in ("steps", "first", "again", "host_bytes"))
        peak = "-" if row.predicted is None else f"{row.predicted / GIB:.2f}"
        times = f"{first:>9.2f}{again:>9.2f}{again / steps:>8.2f}"
        print(f"{row.source:<31}{row.name:<16}{steps:>6}{times}{host / 2**20:>10.0f}{peak:>10}")
    print(f"\n{'':<38}{'faster than MemTracker':>26}{'times bare FakeTensorMode':>28}")
    print(f"{'model':<31}{'call':<7}{'per answer':>14}{'per step':>12}{'per answer':>16}{'per step':>12}")
    for model in MODELS:
        ours, tracker, bare = (runs[model, tool][0].details for tool in TOOLS)
        for call in ("first", "again"):
            step, tracker_step, bare_step = (one[call] / one["steps"] for one in (ours, tracker, bare))
            faster = f"{tracker[call] / ours[call]:>13.1f}x{tracker_step / step:>11.1f}x"
            above = f"{ours[call] / bare[call]:>15.2f}x{step / bare_step:>11.2f}x"
            print(f"{WORKLOADS[model].title:<31}{call:<7}{faster}{above}")
    return True


def traced(tool: str, model: str) -> dict[str, Any]:
    """In a worker: the first and the second call of one tool."""
    # What any tool imports, and what torch imports at the first optimizer step: the tools would be charged by chance.

    import vram_guard.simulate.tracing.run  # noqa: F401

    workload = WORKLOADS[model]
    workload.prepare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = timed(lambda: TOOLS[tool](workload))
    host = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    again = timed(lambda: TOOLS[tool](workload))
    peak, steps = first.result
    details = {"first": first.wall, "again": again.wall, "steps": steps, "host_bytes": host}
    return asdict(Row(workload.title, tool, None, peak, "", first.wall, details=details))


def _ours(workload: Workload) -> tuple[int, int]:
    timeline = trace(workload.step)
    steps = max(phase.step for phase in timeline.phases) * len(timeline.traced)
    return timeline.at(workload.batch_size).peak_allocated, steps


def _bare(workload: Workload) -> tuple[None, int]:
    run_untracked(workload)
    return None, STEPS


TOOLS: dict[str, Callable[[Workload], tuple[int | None, int]]] = {
    "vram_guard": _ours,
    "MemTracker": lambda workload: (tracked_peak(workload), STEPS),
    "FakeTensorMode": _bare,
}


class Timed(NamedTuple):
    """A result, and what it took."""

    result: Any
    wall: float
    cpu: float
    memory: int
    """Bytes, of the largest process that was waited for so far."""


def timed(work: Callable[[], Any]) -> Timed:
    """The result of some work; its copies of this process that have ended count too."""
    wall, cpu = time.perf_counter(), _processor_seconds()
    result = work()
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Timed(result, time.perf_counter() - wall, _processor_seconds() - cpu, memory)


def _processor_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# --- a plan ---------------------------------------------------------------------------------------------------


def plans(rows: list[Row]) -> bool:
    """Make each plan in a worker; False where one takes too long."""
    head = f"{'model':<14}{'batch':>6}{'budget':>8}{'seconds':>9}{'cpu s':>8}{'traces':>8}{'step time':>11}  plan"
    print(head, "-" * len(head), sep="\n")
    found = [Row(**ask(planned, model, limit=None).checked()) for model in PLANNED]
    for row in found:
        facts = row.details
        slower = f"x {facts['slowdown']:.2f}" if row.fits else "-"
        changes = "; ".join(f"{name}: {after}" for name, _, after in facts["changes"]) or "nothing fits"
        print(
            f"{row.source:<14}{facts['batch_size']:>6}{row.name:>8}{row.seconds:>9.1f}{facts['cpu_seconds']:>8.1f}"
            f"{facts['traces']:>8}{slower:>11}  {changes}"
        )
    rows += found
    return all((row.seconds or 0.0) <= LONGEST_PLAN for row in found)


def planned(model: str) -> dict[str, Any]:
    """In a worker: one plan."""
    workload, (budget, size) = WORKLOADS[model], PLANNED[model]
    workload.prepare()
    said: list[str] = []
    options = PlanOptions(host_budget="256GiB")
    took = timed(
        lambda: plan(
            workload.step, size, budget, gpu="A100 80GB", allow=TECHNIQUES, options=options, progress=said.append
        )
    )
    made = took.result
    details = {
        "batch_size": size,
        "cpu_seconds": took.cpu,
        "traces": sum(line.startswith("tracing") for line in said),
        "slowdown": made.slowdown,
        "changes": [list(change) for change in made.changes()],
    }
    title = workload.title.partition(",")[0]
    return asdict(Row(title, budget, None, made.peak, made.estimate.tier, took.wall, fits=made.fits, details=details))


# --- a proof --------------------------------------------------------------------------------------------------


def proofs(rows: list[Row]) -> bool:
    """Prove a plan for each model in a worker; False where one takes too much processor time."""
    head = f"{'model':<13}{'here':>7}{'cpu':>7}{'copy':>8}{'cpu':>7}{'proof':>9}{'cpu':>7}{'memory':>11}  how"
    print(head, "-" * len(head), sep="\n")
    found = [Row(**ask(proved, model, limit=None).checked()) for model in PROVED]
    for row in found:
        facts = row.details
        print(
            f"{row.source:<13}{row.seconds:>7.1f}{facts['here_cpu']:>7.1f}{facts['copy_seconds']:>8.1f}"
            f"{facts['copy_cpu']:>7.1f}{facts['proof_seconds']:>9.1f}{facts['proof_cpu']:>7.1f}"
            f"{format_bytes(facts['proof_memory']):>11}  {facts['proof']}"
        )
    rows += found
    return all(row.details["proof_cpu"] <= LONGEST_PROOF for row in found)


def proved(model: str) -> dict[str, Any]:
    """In a worker: one training, looked at in both ways, and the proof."""
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.utils.data import DataLoader

    workload = WORKLOADS[model]
    workload.prepare()
    small: Any = BoringModel()
    _look(small, DataLoader(small.train_dataloader().dataset, batch_size=4))  # what is imported on first use
    step: Any = workload.step
    data: Any = [_sample(step.batch(1), number) for number in range(SAMPLES)]
    here, copy, proof = _look(_module(workload), DataLoader(data, batch_size=BATCH))
    details = {"here_cpu": here.cpu, "copy_seconds": copy.wall, "copy_cpu": copy.cpu}
    details |= {"proof_seconds": proof.wall, "proof_cpu": proof.cpu, "proof_memory": proof.memory}
    details["proof"] = proof.result
    title = workload.title.partition(",")[0]
    return asdict(Row(title, "proof", None, None, "", here.wall, details=details))


def _module(workload: Workload) -> Any:
    """A Lightning module with the network, the loss and the optimizer of a workload."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.build()

        def training_step(self, batch: Any, _batch_idx: int) -> Any:
            return workload.step.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            step: Any = workload.step
            return step.optimizer(self.parameters())

    return Module()


def _sample(batch: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """A random sample of the shapes of a batch of one; labels of classes stay within those of two."""
    made = torch.Generator().manual_seed(number)
    one = {name: part[0] for name, part in batch.items()}
    images = {name: torch.randn(part.shape, generator=made) for name, part in one.items() if part.is_floating_point()}
    if images:
        return {**{name: torch.tensor(number % 2) for name in one}, **images}
    tokens = torch.randint(0, 50_257, one["input_ids"].shape, generator=made)
    return dict.fromkeys(one, tokens)


class _LookedAt(Exception):  # noqa: N818 - it ends the training, of which nothing more is needed
    """The measurement is done."""


def _look(module: Any, loader: Any) -> list[Timed]:
    """In the process, in a copy, and the proof; where the guard decides."""
    from lightning.pytorch import Trainer

    from vram_guard.forks.fork import run_in_fork
    from vram_guard.guard import guard
    from vram_guard.patching import replaced
    from vram_guard_lightning import VramGuard

    seen: list[Timed] = []

    def look(training: Any, *_settings: Any) -> NoReturn:
        copy = timed(lambda: run_in_fork(lambda _progress: _pinned(training.capture())[0].peak))
        here = timed(lambda: _pinned(training.capture())[0].peak)
        seen.extend((here, copy, run_in_fork(lambda _progress: _proof(training.capture()))))
        raise _LookedAt

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: Any = dict.fromkeys(names, False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[VramGuard(budget=ENOUGH)], **quiet)
    with replaced(guard, {"decide": look}), contextlib.suppress(_LookedAt):
        trainer.fit(module, loader)
    return seen


def _pinned(captured: Any) -> tuple[Any, Any, Any]:
    """A plan of two micro-batches, and what a proof of it needs."""
    from vram_guard.proof.loss_graph import LossGraph

    graph = LossGraph(captured.step, captured.loaded)
    captured = replace(captured, step=graph.step)
    size = captured.sample.batch_size
    pin = {"micro_batch_size": -(-size // 2)}
    with captured.symbolic_run():
        return plan(captured.step, size, ENOUGH, allow=["accumulate"], pin=pin), captured, graph


def _proof(captured: Any) -> Timed:
    """The words of the proof."""
    from vram_guard.proof.prove import Proof, prove

    made, captured, graph = _pinned(captured)
    proof = timed(lambda: prove(captured, made, graph, None))
    return proof._replace(result=proof.result.words if isinstance(proof.result, Proof) else proof.result.reason)


# --- an iteration ---------------------------------------------------------------------------------------------


def iterations(rows: list[Row]) -> bool:
    """Train by turns, so that other load affects all alike; False where the guard's share is too large."""
    sys.path.insert(0, str(EXAMPLE))
    best = dict.fromkeys(GUARDS, float("inf"))
    for _ in range(ROUNDS):
        for name, settings in GUARDS.items():
            best[name] = min(best[name], iteration(_tiny(), settings))
    real, plain = iteration(_real(), {}), best["no guard"]
    print(f"{'':20}  {'iteration':>10}  {'added':>9}  of one of {1000 * real:.0f} ms, the bird's-eye view example's")
    for name, seconds in best.items():
        added = seconds - plain
        print(f"{name:20}  {1e6 * seconds:>7.0f} us  {1e6 * added:>+6.1f} us  {added / real:.4%}")
        rows.append(Row("MMEngine", name, None, None, "", seconds, details={"added": added, "real": real}))
    return (best["guard"] - plain) / real <= LARGEST_SHARE


def iteration(config: Any, settings: dict[str, Any]) -> float:
    """Processor seconds of one iteration, the first tenth of the training left out."""
    from mmengine.hooks import Hook
    from mmengine.runner import Runner

    from vram_guard_mmengine import VramGuardHook

    class Clock(Hook):  # type: ignore[misc]
        priority = "LOWEST"
        start = seconds = 0.0

        def after_train_iter(self, runner: Any, *_others: Any, **_named: Any) -> None:
            if runner.iter + 1 == runner.max_iters // 10:
                self.start = time.process_time()
            if runner.iter + 1 == runner.max_iters:
                self.seconds = (time.process_time() - self.start) / (runner.max_iters - runner.max_iters // 10)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), _silence():
        config.work_dir, config.launcher = folder, "none"
        config.experiment_name = f"bench_{time.time_ns()}"
        runner = Runner.from_cfg(config)
        runner.register_hook(clock)
        if settings:
            runner.register_hook(VramGuardHook(**settings))
        runner.train()
        for handler in runner.logger.handlers:
            handler.close()
    return clock.seconds


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _tiny() -> Any:
    """A training whose step is almost nothing: four numbers to one."""
    from mmengine.config import Config
    from mmengine.model import BaseModel

    class Point(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, numbers: Any, mode: str = "tensor") -> Any:
            return {mode: self.layer(numbers).square().mean()}

    every = 10 * ITERATIONS
    loader = {"batch_size": 4, "num_workers": 0, "dataset": [{"numbers": torch.ones(4)}] * 64}
    loader |= {"sampler": {"type": "InfiniteSampler", "shuffle": False}, "collate_fn": {"type": "default_collate"}}
    made = {
        "model": {"type": Point},
        "train_dataloader": loader,
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.01}},
        "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": ITERATIONS, "val_interval": every},
        "default_scope": "mmengine",
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": every}},
        "log_processor": {"by_epoch": False},
    }
    return Config(made, format_python_code=False)


def _real() -> Any:
    """The bird's-eye view example, twenty iterations of it."""
    from mmengine.config import Config

    config = Config.fromfile(str(EXAMPLE / "configs" / "lift_splat_small_scenes.py"))
    config.merge_from_dict(
        {"train_cfg.max_iters": 20, "train_cfg.val_interval": 100, "train_dataloader.dataset.scenes": 8}
    )
    for key in ("runner_type", "val_dataloader", "val_evaluator", "val_cfg"):
        config.pop(key)
    return config


PARTS: dict[str, Callable[[list[Row]], bool]] = {
    "trace": traces,
    "plan": plans,
    "proof": proofs,
    "iteration": iterations,
}
