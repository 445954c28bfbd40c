"""Published step times with and without one technique, held against the cost model. Nothing is fitted to them.

Five tables, each of one network on one card; a row names the row from which it differs in one thing.

- GPT-2 small in "Let's reproduce GPT-2 (124M)" (A. Karpathy, 2024): the chapters of the lecture name the milliseconds,
  the commits of github.com/karpathy/build-nanogpt the step: precision, TF32, ``torch.compile``, fused attention. Where
  the optimizer became a fused one, gradients had begun to be clipped, which is left out here.
- Llama 3.2 3B in torchtune's README, "Optimization flags": see ``benchmarks/published/torchtune.py``. It offloads
  activations on a stream of their own (``torchtune/training/_activation_offloading.py``, ``use_streams``).
- DINOv2's ViT-g/14 in torchao's README, "Optimizer CPU offload": every layer checkpointed, gradients left on the GPU.
- A Transformer of 1.0 billion parameters in Lightning's guide to FSDP ("Train models with billions of parameters using
  FSDP", Lightning 2.1), one sequence of 35 tokens on each of two A100 of 40 GB: DistributedDataParallel, FSDP, FSDP in
  host memory. What connects the two is not said; PCI Express is assumed, which every such card has.
- A step of an optimizer alone, of ResNet-101 (github.com/pytorch/pytorch/pull/45299, torch 1.7): no GPU is named there,
  a V100 stands in for it. Optimizers whose formulas need other operators today are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.cases import allow_tf32
from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.networks.convolutional import resnet101
from benchmarks.harness.networks.giant_vit import LAYERS, SIDE, GiantViT
from benchmarks.harness.networks.gpt import LENGTH, ROUND_VOCABULARY, VOCABULARY, Gpt
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import step_of
from benchmarks.published import torchtune
from benchmarks.step_time_mpt import NEAR
from vram_guard import Parallel, TrainingStep
from vram_guard.budget import GPU
from vram_guard.budget.catalogue import find_gpu
from vram_guard.parallel.links import topology
from vram_guard.plan.communication import communication
from vram_guard.plan.roofline import StepTime, total_time
from vram_guard.plan.step_time import step_seconds
from vram_guard.simulate import trace_at
from vram_guard.simulate.compiled import Compiler
from vram_guard.simulate.tracing.run import run_step
from vram_guard.techniques.recipe import Recipe
from vram_guard.timeline import Timeline, Work

#: Seconds that one compilation may take.
LIMIT = 1800.0


class Run(NamedTuple):
    """One published run."""

    name: str
    measured: float
    """Seconds of a step."""
    how: Any
    """What the table's function takes."""
    against: str = ""
    """The row from which it differs in one technique; "" where there is none."""


class Table(NamedTuple):
    """Runs of one network on one card."""

    title: str
    card: str
    predicted: Callable[[Any, GPU], StepTime]
    runs: tuple[Run, ...]


def _traced(step: TrainingStep, size: int, card: GPU, *, compiled: bool = False) -> Timeline:
    capability = card.compute_capability
    if compiled:
        follow = Compiler(lambda count: run_step(step, count, capability, compiled=True), LIMIT)
        return follow(size).on(card.multiprocessors)
    return trace_at(step, size, compute_capability=capability, multiprocessors=card.multiprocessors)


# --- GPT-2 -----------------------------------------------------------------------------------------------------------


class _Gpt(NamedTuple):
    tf32: bool = True
    precision: str = "bf16-mixed"
    compiled: bool = True
    fused_attention: bool = True
    vocabulary: int = VOCABULARY
    optimizer: tuple[tuple[str, bool], ...] = (("foreach", True),)


def _gpt2(how: _Gpt, card: GPU) -> StepTime:
    def model() -> Gpt:
        made = Gpt(fused=how.fused_attention, vocabulary=how.vocabulary)
        if how.compiled:
            made.compile()
        return made

    allow_tf32(how.tf32)
    step = step_of(model, _tokens(LENGTH), _own_loss, lr=3e-4, **dict(how.optimizer))
    step = step.with_(precision=how.precision)
    return step_seconds(_traced(step, 16, card, compiled=how.compiled), 16, card)


def _tokens(length: int) -> Any:
    return lambda samples: torch.zeros(samples, length, dtype=torch.long)


def _own_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


_WRITTEN_OUT = _Gpt(fused_attention=False)

GPT2 = Table(
    "GPT-2 124M, 16 sequences of 1,024 tokens",
    "A100 SXM4 80GB",
    _gpt2,
    (
        Run("float32", 1.000, _WRITTEN_OUT._replace(tf32=False, precision="32-true", compiled=False)),
        Run("TF32", 0.333, _WRITTEN_OUT._replace(precision="32-true", compiled=False), "float32"),
        Run("bf16-mixed", 0.300, _WRITTEN_OUT._replace(compiled=False), "TF32"),
        Run("torch.compile", 0.130, _WRITTEN_OUT, "bf16-mixed"),
        Run("fused attention", 0.096, _Gpt(), "torch.compile"),
        Run("50,304 words, not 50,257", 0.093, _Gpt(vocabulary=ROUND_VOCABULARY), "fused attention"),
        Run(
            "fused AdamW",
            0.090,
            _Gpt(vocabulary=ROUND_VOCABULARY, optimizer=(("fused", True),)),
            "50,304 words, not 50,257",
        ),
    ),
)

# --- Llama 3.2 3B -----------------------------------------------------------------------------------------------------


def _llama(name: str, card: GPU) -> StepTime:
    timeline = _traced(torchtune.step_of_row(name), 2, card, compiled=torchtune.WAYS[name].compiled)
    return step_seconds(replace(timeline, work=tuple(map(_on_a_stream, timeline.work))), 2, card)


def _on_a_stream(item: Work) -> Work:
    """Where activations go to the host: the trace has them copied by ``save_on_cpu``, on the stream that computes."""
    offloads = item.phase in ("forward", "backward") and item.transfer != (0, 0)
    return item._replace(stream=1) if offloads else item


def _llamas() -> Iterator[Run]:
    before = ""
    speeds = (7075, 8998, 9174, 7210, 7309, 7301)  # tokens a second, in the order of the README
    for (name, _way), tokens in zip(torchtune.WAYS.items(), speeds, strict=False):
        shown = name.strip("[]+ ")
        yield Run(shown, 2 * torchtune.TOKENS / tokens, name, before)
        before = shown


LLAMA = Table("Llama 3.2 3B, 2 sequences of 4,096 tokens, bf16-true", "A100 SXM4 80GB", _llama, tuple(_llamas()))

# --- ViT-g ------------------------------------------------------------------------------------------------------------


def _giant(how: tuple[str, bool], card: GPU) -> StepTime:
    precision, on_host = how
    blocks = tuple(f"layers.{number}" for number in range(LAYERS))
    step = step_of(lambda: GiantViT(45), _images, _classified, lr=1e-4, fused=True)
    step = step.with_(precision=precision, recipe=Recipe(checkpoint=blocks, optimizer_on_host=on_host))
    return step_seconds(_traced(step, 32, card), 32, card)


def _images(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(samples, 3, SIDE, SIDE), "y": torch.zeros(samples, dtype=torch.long)}


def _classified(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


GIANT = Table(
    "ViT-g/14, 32 images, every layer checkpointed",
    "RTX 4070 Ti SUPER",
    _giant,
    (
        Run("bf16-true", 1.27, ("bf16-true", False)),
        Run("bf16-true, AdamW in host memory", 1.52, ("bf16-true", True), "bf16-true"),
        Run("bf16-mixed, AdamW in host memory", 2.18, ("bf16-mixed", True), "bf16-true, AdamW in host memory"),
    ),
)

# --- Lightning's Transformer ------------------------------------------------------------------------------------------


def _sharded(how: dict[str, Any], card: GPU) -> StepTime:
    from lightning.pytorch import demos

    def model() -> nn.Module:
        return demos.Transformer(vocab_size=33_278, nlayers=32, nhid=4096, ninp=1024, nhead=64)

    halves = ("encoder", "decoder")
    blocks = tuple(f"transformer.{half}.layers.{number}" for half in halves for number in range(32))
    layout = Parallel(gpus=2, blocks=None if how["kind"] == "ddp" else blocks, **how)
    timeline = _traced(step_of(model, _sentences, _likelihood, "Adam", lr=0.1).with_(parallel=layout), 1, card)
    waited = communication(timeline, 1, card, topology("pcie", gpus=2, node=2, gpu=card))
    return step_seconds(timeline, 1, card) + waited.step_time


def _sentences(samples: int) -> dict[str, torch.Tensor]:
    words = torch.zeros(samples, 35, dtype=torch.long)
    return {"x": words, "y": words.clone()}


def _likelihood(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.nll_loss(model(batch["x"], batch["y"]), batch["y"].view(-1))


SHARDED = Table(
    "Transformer of 1.0 billion parameters, 35 tokens, 2 GPUs",
    "A100 PCIe 40GB",
    _sharded,
    (
        Run("DDP", 1 / 4.31, {"kind": "ddp"}),
        Run("FSDP", 1 / 3.19, {"kind": "fsdp1"}, "DDP"),
        Run("FSDP, weights kept for the backward pass", 1 / 3.61, {"kind": "fsdp1", "reshard": False}, "FSDP"),
        Run("FSDP in host memory", 1 / 0.02, {"kind": "fsdp1", "offload": True}, "FSDP"),
    ),
)

# --- optimizers -------------------------------------------------------------------------------------------------------


def _optimizer_alone(how: tuple[str, bool], card: GPU) -> StepTime:
    name, foreach = how
    step = step_of(resnet101, lambda samples: torch.zeros(samples, 3, 64, 64), _summed, name, lr=1e-3, foreach=foreach)
    work = _traced(step, 1, card).work
    return total_time((item for item in work if item.phase == "optimizer"), 1, card)


def _summed(model: Any, images: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(images).sum()
    return total


def _optimizers() -> Iterator[Run]:
    for name, loop, lists in (
        ("Adam", 0.04269, 0.01016),
        ("AdamW", 0.05138, 0.01563),
        ("SGD", 0.00628, 0.00440),
        ("RMSprop", 0.02863, 0.00589),
    ):
        yield Run(f"{name}, for-loop", loop, (name, False))
        yield Run(f"{name}, foreach", lists, (name, True), f"{name}, for-loop")


OPTIMIZERS = Table(
    "the step of an optimizer, ResNet-101", "Tesla V100 SXM2 16GB", _optimizer_alone, tuple(_optimizers())
)

TABLES = {"gpt2": GPT2, "llama": LLAMA, "giant": GIANT, "sharded": SHARDED, "optimizers": OPTIMIZERS}


# --- what the model says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A run and the model's seconds."""

    run: Run
    seconds: float


Pair = tuple[Answer, Answer]


def predicted_seconds(table: str, name: str) -> float:
    """In a worker, whose switches for TF32 are its own: the seconds of one run."""
    found = TABLES[table]
    how = next(run.how for run in found.runs if run.name == name)
    return found.predicted(how, find_gpu(found.card)).seconds


def single_changes(answers: Sequence[Answer]) -> Iterator[Pair]:
    """The pairs that differ in one technique: without it, and with it."""
    by_name = {answer.run.name: answer for answer in answers}
    return ((by_name[one.run.against], one) for one in answers if one.run.against)


def ranked_right(one: Answer, other: Answer) -> bool:
    """True if the model puts two runs in the order in which they were measured."""
    return (one.run.measured < other.run.measured) == (one.seconds < other.seconds)


def is_near(one: Answer, other: Answer) -> bool:
    """True if two runs were measured at nearly the same speed."""
    first, second = one.run.measured, other.run.measured
    return abs(first - second) < NEAR * max(first, second)


def lines(answers: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
    """The cells of a table: seconds, then both ratios to the row without the technique, and their error."""
    without = {with_.run.name: one for one, with_ in single_changes(answers)}
    for answer in answers:
        cells = [answer.run.name, *(f"{1000 * one:,.1f}" for one in (answer.run.measured, answer.seconds))]
        before = without.get(answer.run.name)
        if before is not None:
            measured, ours = answer.run.measured / before.run.measured, answer.seconds / before.seconds
            right = "" if ranked_right(before, answer) else "wrong"
            cells += [f"{measured:.2f}", f"{ours:.2f}", f"{ours / measured - 1:+.0%}", right]
        yield tuple(cells)


def shares(pairs: Sequence[Pair]) -> str:
    """How many pairs are ranked right: of all, and of those that were measured well apart."""
    far = [pair for pair in pairs if not is_near(*pair)]
    right, surely = (sum(ranked_right(*pair) for pair in some) for some in (pairs, far))
    return f"{right} of {len(pairs)}, measured at least {NEAR:.0%} apart: {surely} of {len(far)}"


def main(arguments: list[str] | None = None) -> None:
    """Print every row beside the row without its technique, and the share of pairs that are ranked right."""
    options = arguments_of("benchmarks.step_time_techniques", __doc__, only="tables").parse_args(arguments)
    singles: list[Pair] = []
    for name in chosen(TABLES, options.only):
        table, answers = TABLES[name], []
        print(f"\n{f'{table.title}, {table.card}':<72}{'ms':>9}{'model':>9}{'ratio':>9}{'model':>9}{'error':>9}")
        for run in table.runs:
            answers.append(Answer(run, ask(predicted_seconds, name, run.name, limit=None).checked()))
            title, *cells = list(lines(answers))[-1]
            print(f"  {title:<69}", *(f"{cell:>8}" for cell in cells), flush=True)
        print(f"  pairs ranked right: {shares(list(combinations(answers, 2)))}")
        singles += single_changes(answers)
    print(f"\npairs that differ in one technique: {shares(singles)}")


if __name__ == "__main__":
    main()
