"""What a training costs the host: microseconds of an operator, of a checkpointed call, of an operator that is selected.

    python -m benchmarks.bench_host [--device cuda] [--json FILE] [--only WORD ...]
    python -m benchmarks.bench_host --against FILE

On the CPU the networks are so narrow that starting operators is nearly all there is. On a GPU they have the width that
transformers gives them, with one short sample, and the GPU waits for the host: seconds until an update is started are
taken. None of them is one of the GPU suite's, so that constants read off here (``vram_guard/plan/roofline.py``) are
judged by other rows. ``--against`` measures nothing: it prints what follows from a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.gpu.loop import RealLoop
from benchmarks.gpu.techniques import recipe_of
from benchmarks.harness.checked import content, parsed, write_json
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.networks.batches import Batch, Batches, classified, language, own_loss
from benchmarks.harness.networks.language import from_config
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import optimizer_of
from vram_guard import TrainingStep, trace
from vram_guard.plan.roofline import HOST_PER_OPERATOR, LAUNCH
from vram_guard.plan.step_time import checkpointed_calls
from vram_guard.step import Precision
from vram_guard.techniques import AS_WRITTEN

#: Updates before those that are timed, and how many of these.
UNTIMED, TIMED = 3, 15


class Network(NamedTuple):
    """A model of transformers, what makes it narrow, and the operators that selective checkpointing keeps."""

    config: str
    model: str
    sizes: Mapping[str, Any]
    narrow: Mapping[str, Any]
    batch: Batches
    keeps: str

    def build(self, device: str) -> nn.Module:
        """The model with random weights."""
        return from_config(self.config, self.model, **self.sizes, **(self.narrow if device == "cpu" else {}))


def _images(size: int) -> Batch:
    batch = classified(3, 64, 64, classes=2)(size)
    return {"pixel_values": batch["x"], "labels": batch["y"]}


_WORDS = {"vocab_size": 1000, "use_cache": False}
NETWORKS = {
    "t5": Network(
        *("T5Config", "T5ForConditionalGeneration", {**_WORDS, "decoder_start_token_id": 0}),
        {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 4},
        *(language(16, 1000), "keep products"),
    ),
    "distilbert": Network(
        *("DistilBertConfig", "DistilBertForMaskedLM", {"vocab_size": 1000}),
        {"dim": 16, "hidden_dim": 16, "n_heads": 4},
        *(language(16, 1000), "keep attention"),
    ),
    "opt": Network(
        *("OPTConfig", "OPTForCausalLM", _WORDS),
        {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 4, "word_embed_proj_dim": 16},
        *(language(16, 1000), "keep products"),
    ),
    "convnext": Network(
        *("ConvNextConfig", "ConvNextForImageClassification", {}, {"hidden_sizes": [8, 8, 8, 8]}),
        *(_images, "keep convolutions"),
    ),
    "regnet": Network(
        *("RegNetConfig", "RegNetForImageClassification", {}),
        {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "groups_width": 8},
        *(_images, "keep convolutions"),
    ),
}
#: On a CPU, half precision takes other ways than on a GPU.
PRECISIONS: dict[str, tuple[Precision, ...]] = {"cpu": ("32-true",), "cuda": ("32-true", "bf16-mixed")}


@dataclass(frozen=True)
class Setup:
    """One network in one precision under one technique."""

    network: str
    precision: Precision
    technique: str

    @property
    def name(self) -> str:
        """As ``--only`` and the rows of a file have it."""
        return " ".join(filter(None, (self.network, self.precision, self.technique)))

    def step(self, device: str) -> TrainingStep:
        """The step, for its trace and for the device alike."""
        network = NETWORKS[self.network]

        def build() -> nn.Module:
            return network.build(device)

        return TrainingStep(
            model=build,
            batch=network.batch,
            loss=own_loss,
            optimizer=optimizer_of("AdamW"),
            precision=self.precision,
            recipe=recipe_of(self.technique, build),
        )


def setups(device: str) -> Iterator[Setup]:
    """Each network as written, with every block checkpointed, and with some results kept."""
    for network, precision in product(NETWORKS, PRECISIONS[device]):
        for technique in ("", "checkpoint", NETWORKS[network].keeps):
            yield Setup(network, precision, technique)


def seconds(one: Setup, device: str) -> float:
    """The least seconds until an update is started on an idle device."""
    loop = RealLoop(one.step(device), 1, device)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    loop.run(1, wait)
    for _ in range(UNTIMED):
        loop.repeat()
    found = []
    for _ in range(TIMED):
        wait()
        before = time.perf_counter()
        loop.repeat()
        found.append(time.perf_counter() - before)
    return round(min(found), 6)


class Counts(NamedTuple):
    """What the host starts in one update."""

    trained: int
    """Operators of the forward and the backward pass."""
    other: float
    """Seconds of the model for everything else."""
    calls: int
    """Of checkpointed modules."""
    selected: int
    """Operators of both forwards of modules under selective checkpointing."""


def counts(network: str, precision: Precision, technique: str, device: str) -> Counts:
    """In a worker: what the step's trace counts."""
    step = Setup(network, precision, technique).step(device)
    work = trace(step).exact(1).work
    trained = [item for item in work if item.phase in ("forward", "backward")]
    launches = sum(item.launches - 1 for item in work)
    other = (len(work) - len(trained)) * HOST_PER_OPERATOR + launches * LAUNCH
    calls: list[list[Any]] = []
    if step.recipe.checkpoint:
        written = trace(replace(step, recipe=AS_WRITTEN)).exact(1).work
        calls = checkpointed_calls(written, frozenset(step.recipe.checkpoint))
    selected = 2 * sum(map(len, calls)) if step.recipe.checkpoint_keeps else 0
    return Counts(len(trained), other, len(calls), selected)


def read_off(rows: Iterable[Mapping[str, Any]], device: str) -> Iterator[tuple[str, str, float]]:
    """For each row its name, what it tells ("operator", "call", "selected"), and the seconds of one."""
    taken = {row["name"]: float(row["seconds"]) for row in rows}
    for one in setups(device):
        written = replace(one, technique="")
        if one.name not in taken or written.name not in taken:
            continue
        known = [_counted(each, device) for each in (written, one)]
        operator = (taken[written.name] - known[0].other) / known[0].trained
        if not one.technique:
            yield one.name, "operator", operator
            continue
        added = taken[one.name] - taken[written.name] - (known[1].trained - known[0].trained) * operator
        if one.technique == "checkpoint":
            yield one.name, "call", added / known[1].calls
            continue
        whole = replace(one, technique="checkpoint")
        if whole.name in taken:
            again = (_counted(whole, device).trained - known[1].trained) * operator
            yield one.name, "selected", (taken[one.name] - taken[whole.name] + again) / known[1].selected


@cache
def _counted(one: Setup, device: str) -> Counts:
    return Counts(*ask(counts, one.network, one.precision, one.technique, device, limit=None).checked())


def main(arguments: list[str] | None = None) -> None:
    """Measure or read, and print every row and the medians."""
    options = _options(arguments)
    if options.against is None:
        found = _measured(options.device, options.only)
        if options.json is not None:
            write_json(options.json, found)
    else:
        found = parsed(content(options.against), options.against)
    told: dict[str, list[float]] = {}
    for name, what, each in read_off(found["rows"], found["device"]):
        told.setdefault(what, []).append(each)
        print(f"{name:35}{what:10}{each * 1e6:8.0f} us", flush=True)
    for what, every in told.items():
        print(
            f"{'median':35}{what:10}{median(every) * 1e6:8.0f} us  ({min(every) * 1e6:.0f} to {max(every) * 1e6:.0f})"
        )


def _measured(device: str, words: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [one for one in setups(device) if is_chosen(one.name, words)]
    rows = [{"name": one.name, "seconds": seconds(one, device)} for one in chosen]
    return {"environment": environment(), "device": device, "rows": rows}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = arguments_of("benchmarks.bench_host", __doc__, only="steps", json="the seconds")
    parser.add_argument("--device", choices=tuple(PRECISIONS), default="cpu")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what was measured before")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
