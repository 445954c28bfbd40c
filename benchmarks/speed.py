"""Seconds of our own answers: a trace beside PyTorch's MemTracker and bare FakeTensorMode, and a plan.

    python -m benchmarks speed [--only WORD ...] [--json FILE]

Each model is asked about in a worker of its own. Seconds contain building the model and exclude imports, also those
that torch does on first use; "cpu" is processor time, which other work on the machine hardly changes. Of a trace,
"first" is the first call in its process, "again" the second; it runs two optimizer steps at two batch sizes, which
gives every batch size. ``MemTracker`` (used as its docstring says) and ``FakeTensorMode`` (nothing recorded: the floor)
run two steps at one size; the ratios are those of whole answers, second calls, in one process. The plan may take every
technique, under a budget that is far too small for the step as written. "guard" is what the Lightning callback adds to
a training that fits as written, until its first batch, in processor time. The exit status is 1 where a plan takes
longer than its limit.
"""

from __future__ import annotations

import contextlib
import io
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.mem_tracker import run_tracked, run_untracked
from benchmarks.harness.networks import NETWORKS, batches, language
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import step_of
from vram_guard import TrainingStep, plan, trace
from vram_guard.plan import PlanOptions
from vram_guard.plan.techniques import TECHNIQUES


class Asked(NamedTuple):
    """One training, with random weights; the budget that is planned for, and two samples or more, for accumulation."""

    title: str
    step: TrainingStep
    budget: str
    batch_size: int
    guarded: bool = True
    """False: its weights have no place on a usual machine, and a guard wants real ones."""


#: Of AdamW; ``foreach`` is what CUDA would choose, given to every tool alike.
SETTINGS = {"lr": 1e-4, "foreach": True}
_RESNET = NETWORKS["resnet50"]
_OF_LLAMA = batches.language(2048, 32_000)
MODELS = {
    "gpt2": Asked(
        "GPT-2 small, 1024 tokens",
        step_of(language.gpt2, batches.language(1024, 50_257), batches.own_loss, **SETTINGS),
        "4GiB",
        8,
    ),
    "resnet50": Asked(
        "ResNet-50, 224 x 224",
        step_of(lambda: _RESNET.build(False), _RESNET.batch, _RESNET.loss, **SETTINGS),
        "2GiB",
        64,
    ),
    "llama7b": Asked(
        "Llama-7B, 2048 tokens",
        step_of(language.llama_7b, _OF_LLAMA, batches.own_loss, **SETTINGS),
        "24GiB",
        4,
        guarded=False,
    ),
}
LONGEST_PLAN = 30.0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = arguments_of("speed", __doc__, only="models", json="everything measured")
    options = parser.parse_args(arguments)
    results = Results(environment=environment())
    peers = f"{'MemTracker':>12}{'ratio':>7}{'bare fake':>11}{'ratio':>7}"
    print(f"{'model':<26}{'first s':>9}{'again s':>9}{peers}{'plan s':>9}{'cpu s':>9}{'traces':>8}{'guard':>8}  plan")
    for name in chosen(MODELS, options.only):
        row = Row(**ask(answered, name, limit=None).checked())
        facts = row.details
        facts["guard"] = ask(guarded, name, limit=None).checked() if MODELS[name].guarded else None
        results.rows.append(row)
        changes = "; ".join(f"{change}: {after}" for change, _, after in facts["changes"]) or "nothing fits"
        ours, tracker, bare = (facts[each] for each in ("again", "tracker", "bare"))
        beside = f"{tracker:>12.2f}{tracker / ours:>6.1f}x{bare:>11.2f}{bare / ours:>6.1f}x"
        times = f"{facts['first']:>9.2f}{ours:>9.2f}{beside}{row.seconds:>9.1f}{facts['cpu_seconds']:>9.1f}"
        guard = "-" if facts["guard"] is None else f"{facts['guard']:.2f}"
        print(f"{row.source:<26}{times}{facts['traces']:>8}{guard:>8}  {changes}", flush=True)
    if options.json:
        write(results, options.json)
    return int(any((row.seconds or 0.0) > LONGEST_PLAN for row in results.rows))


def answered(model: str) -> dict[str, Any]:
    """In a worker: two traces and a plan."""
    import torch._dynamo  # as the first optimizer step does

    asked = MODELS[model]
    build: Any = asked.step.model
    with torch.device("meta"):
        build()  # imports what it needs
    (_, first, _), (_, again, _) = (timed(lambda: trace(asked.step)) for _ in range(2))
    tracker, bare = (
        min(timed(partial(run, asked.step, asked.batch_size))[1] for _ in range(2))
        for run in (run_tracked, run_untracked)
    )
    said: list[str] = []
    settings: dict[str, Any] = {"allow": TECHNIQUES, "options": PlanOptions(host_budget="256GiB")}
    made, wall, cpu = timed(
        lambda: plan(asked.step, asked.batch_size, asked.budget, gpu="A100 80GB", **settings, progress=said.append)
    )
    details = {
        "first": first,
        "again": again,
        "tracker": tracker,
        "bare": bare,
        "cpu_seconds": cpu,
        "traces": sum(line.startswith("tracing") for line in said),
        "changes": [list(change) for change in made.changes()],
    }
    peak, tier = made.peak, made.estimate.tier
    return asdict(Row(asked.title, asked.budget, None, peak, tier, wall, fits=made.fits, details=details))


def guarded(model: str) -> float:
    """In a worker: processor seconds of the Lightning callback before the first batch."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, StackDataset

    from vram_guard_lightning import VramGuard

    asked = MODELS[model]
    build: Any = asked.step.model
    batches_of: Any = asked.step.batch

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def training_step(self, batch: Any) -> Any:
            return asked.step.loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **SETTINGS)

        def on_train_start(self) -> None:
            raise KeyboardInterrupt  # Lightning ends the training then

    module = Module()
    data = DataLoader(StackDataset(**batches_of(4 * asked.batch_size)), asked.batch_size)
    taken = list[float]()
    for guards in ([VramGuard("80GiB", advanced={"remember": False})], []):
        callbacks: list[Any] = guards
        trainer = Trainer(
            accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        before = _processor_seconds()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, data)
        taken.append(_processor_seconds() - before)
    return taken[0] - taken[1]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of some work, its seconds and the processor's; copies of this process that have ended count too."""
    wall, cpu = time.perf_counter(), _processor_seconds()
    result = work()
    return result, time.perf_counter() - wall, _processor_seconds() - cpu


def _processor_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
