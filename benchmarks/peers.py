"""Our answer beside other estimators', on steps that others have measured: error, and processor seconds.

    python -m benchmarks peers [--only WORD ...] [--json FILE]

First xMem's transformers and two steps that nobody measured: each tool is asked in a worker of its own, which has
imported torch; its seconds contain building the model. What a tool cannot answer is said, and what is not installed is
named (``pip install torch-kitsune torch-preflight fitcheck-llm libcst``). ``FakeTensorMode``, which records nothing, is
the floor of what running a step symbolically costs. Then our command, whole, imports included: asked for the first
time, and again, when its timeline is remembered. Last the LoRA trainings that fitcheck-llm's author measured on a
T4, of which its constants were made: its error on the process' peak, and ours, as ``published`` found it, on what
PyTorch reserved.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.command import arguments_of, chosen
from benchmarks.harness.environment import environment
from benchmarks.harness.mem_tracker import run_tracked, run_untracked
from benchmarks.harness.networks import batches, language
from benchmarks.harness.records import Results, Row, read, write
from benchmarks.harness.workers import ask
from benchmarks.harness.workloads import step_of
from benchmarks.published import xmem
from benchmarks.published.source import records_of
from benchmarks.speed import MODELS
from vram_guard import TrainingStep, trace
from vram_guard.budget.catalogue import find_gpu

ROOT = Path(__file__).parents[1]
GIB, MIB = 2**30, 2**20
OURS = "vram_guard"


class Asked(NamedTuple):
    """A step, and what was measured of it: bytes, by NVML, of the whole device less its first sample."""

    name: str
    step: TrainingStep
    batch_size: int
    measured: int | None = None
    card: str = "A100 80GB"


class KeptOutputs:
    """A model's own loss, whose outputs a name of the loop holds until the next forward has ended."""

    def __call__(self, model: Any, batch: Any) -> Any:
        outputs = self.kept = model(**batch)
        return outputs.loss


def workloads() -> dict[str, Asked]:
    """By name."""
    rows = [("distilbert/distilgpt2", "28"), ("facebook/opt-125m", "31"), ("EleutherAI/gpt-neo-125M", "8")]
    found = {name: _of_xmem(name, size) for name, size in rows}
    return found | {name: Asked(name, MODELS[name].step, MODELS[name].batch_size) for name in ("gpt2", "resnet50")}


def _of_xmem(model: str, size: str) -> Asked:
    wanted = (model, size, "AdamW")
    row = next(row for row in xmem.TRANSFORMERS.rows() if (row["model"], row["batch_size"], row["optimizer"]) == wanted)
    build, batch = language.published(model), batches.whole_sequences(xmem.LENGTH)
    step = step_of(build, batch, KeptOutputs(), lr=1e-3, foreach=True).with_(zero_grad="before_forward")
    card = next(card for name, card in xmem.CARDS.items() if name in row["gpu_name"])
    return Asked(model, step, int(size), int(row["ground_bytes"]), card)


def step(name: str) -> TrainingStep:
    """For our command."""
    return workloads()[name].step


# --- the tools ------------------------------------------------------------------------------------------------


def _vram_guard(asked: Asked) -> int:
    capability = find_gpu(asked.card).compute_capability
    return trace(asked.step, compute_capability=capability).at(asked.batch_size).peak_reserved


def _mem_tracker(asked: Asked) -> int:
    return int(run_tracked(asked.step, asked.batch_size) or 0)


def _kitsune(asked: Asked) -> int:
    predict: Any = import_module("kitsune.predict").predict_memory
    made: Any = asked.step
    found = predict(made.model(), _sample_shape(asked), batch_size=asked.batch_size, optimizer="adamw")
    return int(found.total_bytes)


def built(name: str) -> Any:
    """A model, for a tool that asks for a function by its name."""
    made: Any = workloads()[name].step
    return made.model()


def _preflight(asked: Asked) -> int:
    vram = "torch_preflight.vram"
    types, costs = import_module(f"{vram}.types"), import_module(f"{vram}.costmodel")
    shape = _sample_shape(asked)
    sizes = {"seq_len": shape[0]} if len(shape) == 1 else {"image_size": shape[-1]}
    config = types.RunConfig(batch_size=asked.batch_size, optimizer=types.OptimizerKind("adamw"), **sizes)
    table = import_module(f"{vram}.archdb")
    entry = table.lookup(asked.name)
    profile = table.profile_from_entry(entry) if entry is not None else None
    if profile is None:
        profile = import_module(f"{vram}.providers.meta").profile(f"{__name__}:built", config, {"name": asked.name})
    return int(costs.estimate(profile, config).breakdown.total)


def _sample_shape(asked: Asked) -> tuple[int, ...]:
    made: Any = asked.step
    return tuple(next(iter(made.batch(1).values())).shape[1:])


TOOLS: dict[str, Callable[[Asked], int]] = {
    OURS: _vram_guard,
    "MemTracker": _mem_tracker,
    "FakeTensorMode": lambda asked: run_untracked(asked.step, asked.batch_size) or 0,
    "torch-kitsune": _kitsune,
    "torch-preflight": _preflight,
}


def answer(tool: str, name: str) -> dict[str, Any]:
    """In a worker: one tool's row."""
    asked = workloads()[name]
    made: Any = asked.step
    import torch._dynamo  # as the first optimizer step does

    with torch.device("meta"):
        made.model()  # imports what it needs
    began = time.process_time()
    try:
        predicted, reason = TOOLS[tool](asked), ""
    except Exception as error:  # noqa: BLE001 - another's code: the table goes on
        predicted, reason = 0, f"{type(error).__name__}: {error}"[:120]
    seconds = time.process_time() - began
    row = Row(tool, name, asked.measured, predicted or None, "", None if reason else seconds, reason=reason)
    return asdict(row)


# --- our command, whole ---------------------------------------------------------------------------------------


def command_seconds(name: str) -> tuple[float, float]:
    """Processor seconds of our command, asked for the first time and again."""
    asked = workloads()[name]
    with tempfile.TemporaryDirectory() as cache:
        where = os.pathsep.join((str(ROOT), str(ROOT / "integrations")))
        variables = {**os.environ, "VRAM_GUARD_CACHE": cache, "PYTHONPATH": where}
        words = ("plan", "--step", f"{__name__}:step", "--set", f"name={name}", "--batch", str(asked.batch_size))
        command = [sys.executable, "-m", "vram_guard", *words, "--gpu", "H200"]
        first, again = (_seconds(command, variables) for _ in range(2))
    return first, again


def _seconds(command: list[str], variables: dict[str, str]) -> float:
    def used() -> float:
        times = os.times()
        return times.children_user + times.children_system

    before = used()
    subprocess.run(command, env=variables, check=True, capture_output=True, cwd=ROOT)
    return used() - before


# --- fitcheck-llm's own measurements --------------------------------------------------------------------------


def on_a_t4() -> Iterator[tuple[float, float]]:
    """The relative errors of fitcheck-llm, and ours, on each of the trainings that its author measured."""
    theirs = import_module("fitcheck")
    ours = read(ROOT / "benchmarks/published/results/lora_t4.json").rows
    errors = {(row.name, row.measured): row.error for row in ours if "reserved" in row.source}
    records = records_of("lora_t4.csv")
    sizes_of = {record["model"]: record for record in records if record["hidden_size"]}
    for given in records:
        name = f"{given['model'].partition('/')[2]} {given['attention']}, {given['batch']} x {given['tokens']}"
        error = errors.get((name, int(float(given["peak_reserved_mib"] or 0) * MIB)))
        if error is None or not given["process_mib"]:
            continue
        record = {**given, **{size: sizes_of[given["model"]][size] for size in _SIZES}}
        sizes = {size: int(record[size]) for size in ("hidden_size", "intermediate_size", "vocab_size")}
        heads, width = int(record["heads"]), int(record["hidden_size"])
        config = theirs.ModelConfig(
            name=record["model"],
            num_params=_parameters(record),
            num_layers=int(record["layers"]),
            num_attention_heads=heads,
            num_kv_heads=int(record["kv_heads"]),
            head_dim=width // heads,
            tie_word_embeddings=record["tied"] == "True",
            **sizes,
        )
        training = theirs.TrainingConfig(
            precision=record["precision"],
            quantization=record["quantization"],
            double_quant=record["double_quant"] == "True",
            optimizer=record["optimizer"],
            batch_size=int(record["batch"]),
            seq_len=int(record["tokens"]),
            lora_rank=int(record["lora_rank"]),
            lora_targets=record["lora_targets"].split(),
            grad_checkpoint=record["checkpointing"] == "True",
            flash_attn=record["attention"] != "eager",
        )
        found = theirs.estimate(config, training, theirs.get_gpu("t4"))
        yield found.total_mib / float(record["process_mib"]) - 1, error


#: Columns that some rows leave to others of the same model.
_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "layers", "heads", "kv_heads", "tied")


def _parameters(record: dict[str, str]) -> int:
    width, layers, wide = (int(record[name]) for name in ("hidden_size", "layers", "intermediate_size"))
    keys = width * int(record["kv_heads"]) // int(record["heads"])
    each = 2 * width * width + 2 * width * keys + 3 * width * wide + 2 * width
    words = int(record["vocab_size"]) * width
    return layers * each + words * (1 if record["tied"] == "True" else 2) + width


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit status is 1 where vram_guard itself had no answer."""
    parser = arguments_of("peers", __doc__, only="steps", json="every answer")
    options = parser.parse_args(arguments)
    results = Results(environment=environment())
    print(
        f"{'step':<26}{'measured GiB':>13}"
        + "".join(f"{tool:>24}" for tool in TOOLS)
        + f"{'command: first, again':>24}"
    )
    for name in chosen(workloads(), options.only):
        rows = [Row(**ask(answer, tool, name, limit=900.0).checked()) for tool in TOOLS]
        results.rows += rows
        measured = workloads()[name].measured
        cells = "".join(f"{_cell(row):>24}" for row in rows)
        first, again = command_seconds(name)
        known = f"{measured / GIB:.2f}" if measured else "-"
        print(f"{name:<26}{known:>13}{cells}{f'{first:.1f} s, {again:.2f} s':>24}", flush=True)
    for row in results.rows:
        if row.reason:
            print(f"{row.source}, {row.name}: {row.reason}")
    try:
        theirs, ours = zip(*on_a_t4(), strict=True)
    except ImportError as error:
        print(f"fitcheck-llm: {error}")
    else:
        print(f"{len(ours)} LoRA trainings on a T4, error: fitcheck-llm {_spread(theirs)}; vram_guard {_spread(ours)}")
    if options.json:
        write(results, options.json)
    return int(any(row.predicted is None for row in results.rows if row.source == OURS))


def _cell(row: Row) -> str:
    if row.reason:
        return "no answer"
    error = f"{row.error:+.1%}" if row.has_peak else "" if row.predicted is None else f"{row.predicted / GIB:.2f} GiB"
    return f"{error} {row.seconds:.2f} s"


def _spread(errors: tuple[float, ...]) -> str:
    sizes = [abs(one) for one in errors]
    return f"median {statistics.median(sizes):.2%}, largest {max(sizes):.1%}"
