"""The estimators, each as a function of a workload. They run in processes of their own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers import formulas
from benchmarks.peers.workloads import Workload, workloads

#: Above this many bytes of weights a model is handed over without them (on the meta device): this machine's memory
#: would not hold a training script's own copy.
LARGEST_REAL_MODEL = 8 * 2**30

#: Iterations: the first has no optimizer state yet.
STEPS = 2

NOT_APPLICABLE = "the formula does not apply"


class NoAnswerError(Exception):
    """The tool has nothing to say about this workload; the message says why."""


@dataclass(frozen=True)
class Tool:
    """One estimator.

    Attributes:
        predict: workload -> bytes, and the seconds that only the tool took.
        requires: a module that has to be importable; "" for none.
        install: what to install where it is not.
    """

    name: str
    predict: Callable[[Workload], int]
    requires: str = ""
    install: str = ""


def ask(tool: str, workload: str) -> dict[str, Any]:
    """In a worker: one tool about one workload. Seconds contain building the model, and exclude imports."""
    asked = TOOLS[tool]
    step = workloads()[workload]
    row: dict[str, Any] = {"tool": tool, "workload": workload, "predicted": None, "seconds": None, "why": ""}
    try:
        if asked.requires:
            import_module(asked.requires)
    except ImportError:
        return {**row, "why": f"not installed: {asked.install}"}
    with torch.device("meta"):
        step.build()  # for what models import on first use
    started = time.perf_counter()
    try:
        row["predicted"] = asked.predict(step)
        row["seconds"] = time.perf_counter() - started
    except NoAnswerError as reason:
        row["why"] = str(reason)
    except Exception as error:  # noqa: BLE001 - another's code: the table goes on
        row["why"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        row["traceback"] = traceback.format_exc()
    return row


# --- ours, and torch's ----------------------------------------------------------------------------------------


def _vram_guard(workload: Workload) -> int:
    from vram_guard import TrainingStep, trace

    step = TrainingStep(
        model=workload.build,
        batch=workload.batch,
        loss=workload.loss,
        optimizer=workload.make_optimizer,
        zero_grad="before_forward",
    )
    capability = workload.measured.compute_capability if workload.measured else (8, 0)
    return trace(step, compute_capability=capability).at(workload.batch_size).peak_reserved


def _mem_tracker(workload: Workload) -> int:
    """As its docstring says; two iterations."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = workload.build().train()
        optimizer = workload.make_optimizer([p for p in model.parameters() if p.requires_grad])
        batch = workload.batch(workload.batch_size)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()
                optimizer.zero_grad()
                workload.loss(model, batch).backward()
                optimizer.step()
    return sum(int(device["Total"]) for device in tracker.get_tracker_snapshot("peak").values())


# --- formulas -------------------------------------------------------------------------------------------------


def _counted(workload: Workload, *, trained_only: bool = False) -> formulas.Model:
    """Parameters of the model, built without memory. Tied ones are one object, and counted once."""
    with torch.device("meta"):
        model = workload.build()
    kept = [p for p in model.parameters() if p.requires_grad or not trained_only]
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return formulas.Model(sum(p.numel() for p in kept), largest)


def _zero2(workload: Workload) -> int:
    return formulas.deepspeed_zero2(_counted(workload))


def _zero3(workload: Workload) -> int:
    return formulas.deepspeed_zero3(_counted(workload))


def _accelerate(workload: Workload) -> int:
    """``accelerate estimate-memory``'s column "Training using Adam" for float32, without the Hub in between."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = workload.build()
    total, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total, "float32").values()))


def _grid_guide(workload: Workload) -> int:
    layers = workload.layers
    if layers is None:
        raise NoAnswerError(f"{NOT_APPLICABLE}: layers of different sizes")
    sizes = (layers.sequence, layers.height, layers.width, layers.hidden, layers.number)
    return formulas.grid_guide(formulas.grid_guide_activations(workload.batch_size, *sizes))


def _twin_guide(workload: Workload) -> int:
    tensors = workload.batch(workload.batch_size).values()
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return formulas.twin_guide(_counted(workload, trained_only=True).parameters, workload.models, batch_bytes)


def _kitsune(workload: Workload) -> int:
    """``predict_memory``; for token models with the shape that its own Hugging Face door takes: (length,)."""
    from kitsune.predict import predict_memory

    large = _counted(workload).parameters * formulas.FLOAT > LARGEST_REAL_MODEL
    with torch.device("meta" if large else "cpu"):
        model = workload.build()
    found = predict_memory(
        model, workload.sample_shape, batch_size=workload.batch_size, optimizer=workload.optimizer.lower()
    )
    return int(found.total_bytes)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("vram_guard", _vram_guard),
        Tool("MemTracker", _mem_tracker, "torch.distributed._tools.mem_tracker", "a newer torch"),
        Tool("DeepSpeed ZeRO-2", _zero2),
        Tool("DeepSpeed ZeRO-3", _zero3),
        Tool("Accelerate", _accelerate, "accelerate", "pip install accelerate"),
        Tool("guide: grid", _grid_guide),
        Tool("guide: twin", _twin_guide),
        Tool("torch-kitsune", _kitsune, "kitsune.predict", "pip install torch-kitsune"),
    )
}
