"""Seconds of looking at a training in a forked copy of its process, and of proving a plan of two micro-batches.

Lightning modules with random weights, data sets of a few random samples. "here" is the decision in the process itself,
"copy" the same in a forked copy, as the guard does it; "proof" comes on top, also in a copy: the graph of the loss and,
where that takes no longer than --limit, one optimizer step of four samples, run twice. "cpu" is processor time,
also of the copies, which other work on the machine hardly changes; "memory" the most that a process of the proof held,
with what it shares with its original. Exits with 1 where a proof takes more processor time than --limit.

The last lines are the price of comparing each recomputation while training: processor seconds of a step of checkpointed
transformer layers on one thread, with and without, by turns.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any, NamedTuple, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import WORKLOADS
from vram_guard.forks.fork import run_in_fork
from vram_guard.guard import guard
from vram_guard.guard.training import CapturedTraining, Training
from vram_guard.patching import replaced
from vram_guard.plan import plan
from vram_guard.proof.loss_graph import LossGraph
from vram_guard.proof.prove import Proof, prove
from vram_guard.techniques import Recipe, install
from vram_guard.units import format_bytes
from vram_guard_lightning import VramGuard

MODELS = ("resnet50", "gpt2", "vit-large")
#: Samples of a batch, and of the data set: more than the proof runs, and few enough to be made quickly.
BATCH, SAMPLES = 8, 16
#: Enough for the step as written: two micro-batches are pinned, so that no search is in the seconds.
BUDGET = "75GiB"
LIMIT = 20.0
#: Of the training whose recomputations are compared.
LAYERS, STEPS = 2, 12
#: A proof that is run whatever its estimate says, to be compared with it.
NO_LIMIT = 1e6


def main() -> int:
    """Measure everything and print it."""
    parser = arguments_of("bench_proof.py", __doc__, json="everything measured")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default: %(default)s)")
    parser.add_argument("--run", action="store_true", help="run the step however long it takes")
    options = parser.parse_args()
    results = Results(environment=environment())
    for model in options.models:
        print(model, file=sys.stderr, flush=True)
        limit = NO_LIMIT if options.run else options.limit
        results.rows.append(Row(**ask(measured, model, limit, limit=None).checked()))
    if options.json:
        write(results, options.json)
    _print(results.rows)
    for width, tokens in ((256, 128), (512, 512)):
        without, compared = ask(recomputed, width, tokens, limit=None).checked()
        print(
            f"{LAYERS} layers of {width}, {tokens} tokens: {without:.3f} s a step, {compared:.3f} s compared "
            f"({compared / without - 1:+.1%})"
        )
    return int(any(row.details["proof_cpu"] > options.limit for row in results.rows) and not options.run)


def measured(model: str, limit: float) -> dict[str, Any]:
    """In a worker: one training, looked at in both ways, and the proof."""
    workload: Any = WORKLOADS[model]
    workload.prepare()
    small = BoringModel()
    _look(small, DataLoader(small.train_dataloader().dataset, batch_size=4), limit)  # what is imported on first use
    data = [_sample(workload.step.batch(1), number) for number in range(SAMPLES)]
    loader = DataLoader(data, batch_size=BATCH)  # type: ignore[arg-type] - a list is a data set
    here, copy, proof = _look(_Module(workload), loader, limit)
    details = {
        "here_cpu": here.cpu,
        "copy_seconds": copy.wall,
        "copy_cpu": copy.cpu,
        "proof_seconds": proof.wall,
        "proof_cpu": proof.cpu,
        "proof_memory": proof.memory,
        "proof": proof.result,
    }
    title = workload.title.partition(",")[0]
    return asdict(Row(title, "proof", None, None, "", here.wall, details=details))


def recomputed(width: int, tokens: int) -> tuple[float, float]:
    """In a worker: seconds of a step of checkpointed layers, without and with a comparison of both forwards."""
    torch.set_num_threads(1)
    layers = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(LAYERS)]
    models = {False: _Checkpointed(*deepcopy(layers)), True: nn.Sequential(*layers)}
    batch = torch.randn(1, tokens, width)
    install(models[True], Recipe(checkpoint=tuple(str(at) for at in range(LAYERS))))
    optimizers = {way: torch.optim.SGD(model.parameters(), lr=1e-3) for way, model in models.items()}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * STEPS):
        compares = turn % 2 == 0
        began = time.process_time()
        optimizers[compares].zero_grad()
        models[compares](batch).square().mean().backward()
        optimizers[compares].step()
        seconds[compares].append(time.process_time() - began)
    without, compared = (statistics.median(seconds[way][2:]) for way in (False, True))
    return without, compared


class _Checkpointed(nn.Sequential):
    """Layers that torch checkpoints: it compares shapes and types alone."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The last layer's output."""
        for layer in self:
            values = checkpoint(layer, values, use_reentrant=False)
        return values

    def ended(self) -> None:
        """Nothing to do."""


class _Module(LightningModule):
    """A network with the loss and the optimizer of its workload."""

    def __init__(self, workload: Any) -> None:
        super().__init__()
        self.model = workload.build()
        self._workload = workload

    def training_step(self, batch: Any, _batch_idx: int) -> Any:
        """The loss."""
        return self._workload.step.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return self._workload.step.optimizer(self.parameters())


def _sample(batch: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """A random sample of the shapes of a batch of one; labels of classes stay within those of two."""
    made = torch.Generator().manual_seed(number)
    one = {name: part[0] for name, part in batch.items()}
    images = {name: torch.randn(part.shape, generator=made) for name, part in one.items() if part.is_floating_point()}
    if images:
        return {**{name: torch.tensor(number % 2) for name in one}, **images}
    tokens = torch.randint(0, 50_257, one["input_ids"].shape, generator=made)
    return dict.fromkeys(one, tokens)


class _Timed(NamedTuple):
    """A result, and what it took."""

    result: Any
    wall: float
    cpu: float
    memory: int
    """Bytes, of the largest process that was waited for so far."""


def _timed(work: Callable[[], Any]) -> _Timed:
    wall, cpu = time.perf_counter(), _processor_seconds()
    result = work()
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return _Timed(result, time.perf_counter() - wall, _processor_seconds() - cpu, memory)


def _processor_seconds() -> float:
    """Of this process, and of its copies that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class _LookedAt(Exception):  # noqa: N818 - it ends the training, of which nothing more is needed
    """The measurement is done."""


def _look(module: LightningModule, loader: Any, limit: float) -> tuple[_Timed, _Timed, _Timed]:
    """In the process, in a copy, and the proof; where the guard decides."""
    seen: list[_Timed] = []

    def look(training: Training, *_settings: Any) -> NoReturn:
        copy = _timed(lambda: run_in_fork(lambda _progress: _planned(training.capture())[0].peak))
        here = _timed(lambda: _planned(training.capture())[0].peak)
        seen.extend((here, copy, run_in_fork(lambda _progress: _proof(training.capture(), limit))))
        raise _LookedAt

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: Any = dict.fromkeys(names, False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[VramGuard(budget=BUDGET)], **quiet)
    with replaced(guard, {"decide": look}), suppress(_LookedAt):
        trainer.fit(module, loader)
    here, copy, proof = seen
    return here, copy, proof


def _planned(captured: CapturedTraining) -> tuple[Any, CapturedTraining, LossGraph]:
    """A plan of two micro-batches, and what a proof of it needs."""
    graph = LossGraph(captured.step, captured.loaded)
    captured = replace(captured, step=graph.step)
    size = captured.sample.batch_size
    pin = {"micro_batch_size": -(-size // 2)}
    with captured.symbolic_run():
        return plan(captured.step, size, BUDGET, allow=["accumulate"], pin=pin), captured, graph


def _proof(captured: CapturedTraining, limit: float) -> _Timed:
    """The words of the proof."""
    made, captured, graph = _planned(captured)
    proof = _timed(lambda: prove(captured, made, graph, None, limit))
    return proof._replace(result=proof.result.words if isinstance(proof.result, Proof) else proof.result.reason)


def _print(rows: list[Row]) -> None:
    head = f"{'model':<13}{'here':>7}{'cpu':>7}{'copy':>8}{'cpu':>7}{'proof':>9}{'cpu':>7}{'memory':>11}  how"
    print(head, "-" * len(head), sep="\n")
    for row in rows:
        facts = row.details
        print(
            f"{row.source:<13}{row.seconds:>7.1f}{facts['here_cpu']:>7.1f}{facts['copy_seconds']:>8.1f}"
            f"{facts['copy_cpu']:>7.1f}{facts['proof_seconds']:>9.1f}{facts['proof_cpu']:>7.1f}"
            f"{format_bytes(facts['proof_memory']):>11}  {facts['proof']}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
