"""The estimators, each as a function of a workload. They run in workers of their own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from benchmarks.harness.mem_tracker import tracked_peak
from benchmarks.harness.records import Row
from benchmarks.peers.workloads import Asked, workloads
from vram_guard import Estimate, trace

#: Above this many bytes of weights a model is handed over without them (on the meta device): this machine's memory
#: would not hold a training script's own copy.
LARGEST_REAL_MODEL = 8 * 2**30

NOT_APPLICABLE = "the formula does not apply"


class NoAnswerError(Exception):
    """The tool gives no answer for this workload; the message says why."""


@dataclass(frozen=True)
class Tool:
    """One estimator.

    Attributes:
        predict: workload -> bytes.
        requires: a module that has to be importable; "" for none.
        install: what to install where it is not.
    """

    name: str
    predict: Callable[[Asked], int]
    requires: str = ""
    install: str = ""


def answer(tool: str, workload: str) -> dict[str, Any]:
    """In a worker: one tool's row about one workload. Processor seconds, with building the model, without imports."""
    asked, step = TOOLS[tool], workloads()[workload]
    try:
        if asked.requires:
            import_module(asked.requires)
    except ImportError:
        return asdict(row_of(tool, step, reason=f"not installed: {asked.install}"))
    with torch.device("meta"):
        step.build()  # for what models import on first use
    started = time.process_time()
    try:
        row = row_of(tool, step, predicted=asked.predict(step), seconds=time.process_time() - started)
    except NoAnswerError as reason:
        row = row_of(tool, step, reason=str(reason))
    except Exception as error:  # noqa: BLE001 - another's code: the table continues
        first = str(error).splitlines()[0][:200] if str(error) else ""
        row = row_of(tool, step, reason=f"failed: {type(error).__name__}: {first}")
        row.details["traceback"] = traceback.format_exc()
    return asdict(row)


def row_of(tool: str, step: Asked, **answered: Any) -> Row:
    """A row of the table: its source is the tool."""
    measured = step.measured
    peak, gpu = (measured.peak, measured.gpu) if measured else (None, "")
    nothing = {"predicted": None, "seconds": None, "tier": ""}
    return Row(source=tool, name=step.title, measured=peak, details={"gpu": gpu}, **{**nothing, **answered})


# --- ours, and torch's ----------------------------------------------------------------------------------------


def traced(workload: Asked) -> Estimate:
    """Our own answer, whole."""
    capability = workload.measured.compute_capability if workload.measured else (8, 0)
    timeline = trace(workload.step.with_(zero_grad="before_forward"), compute_capability=capability)
    return timeline.at(workload.batch_size)


def _vram_guard(workload: Asked) -> int:
    return traced(workload).peak_reserved


# --- formulas -------------------------------------------------------------------------------------------------


#: ``torch.finfo(torch.float32).bits // 8``; every workload here is trained in float32.
FLOAT = 4


class Model(NamedTuple):
    """The sizes of a model that the formulas take."""

    parameters: int
    """Shared ones counted once."""
    largest_layer: int
    """Most parameters that one module holds by itself."""


def deepspeed_zero2(model: Model, gpus: int = 1) -> int:
    """DeepSpeed's estimate for ZeRO-2 without offload, in bytes: ``4 P + 16 P / gpus`` per GPU.

    Source: "Memory Requirements", deepspeed.readthedocs.io/en/latest/memory.html, and
    ``estimate_zero2_model_states_mem_needs`` of deepspeed.runtime.zero.stage_1_and_2. Parameters and gradients in half
    precision, a float32 copy of both, and Adam's two moments.
    """
    return 4 * model.parameters + 16 * model.parameters // gpus


def deepspeed_zero3(model: Model, gpus: int = 1) -> int:
    """DeepSpeed's estimate for ZeRO-3 without offload: ``4 L + 18 P / gpus``, L: largest layer. Source as above."""
    return 4 * model.largest_layer + 18 * model.parameters // gpus


def grid_guide(batch_size: int, sequence: int, height: int, width: int, hidden: int, layers: int) -> int:
    """The smallest GPU that the guide of a super-resolution project calls safe, in bytes.

    Source: its "GPU memory calculator" guide: activations of ``batch x sequence x H x W x hidden x 4 x layers`` may
    take 70% of it. Weights, gradients and optimizer state are expected to stay within the other 30%.
    """
    return batch_size * sequence * height * width * hidden * FLOAT * layers * 10 // 7


def twin_guide(parameters: int, models: int, batch_bytes: int) -> int:
    """Bytes by the guide of a video-diffusion project: model states, a batch, activations of 3 to 5 times the batch.

    Source: its memory estimation guide. One model: ``parameters x (1 + 1 + 2)``; with a frozen original beside the
    trained one: ``parameters x (1 + 1 + 1 + 2)``, times the bytes of an element. Of "3 to 5" the middle is taken here.

    Args:
        parameters: of one of the models.
        models: 1, or 2 with a frozen twin.
        batch_bytes: of the inputs.
    """
    return parameters * (3 + models) * FLOAT + batch_bytes + 4 * batch_bytes


def _counted(workload: Asked, *, trained_only: bool = False) -> Model:
    """Parameters of the model, built without memory. Tied ones are one object, and counted once."""
    with torch.device("meta"):
        model = workload.build()
    kept = [p for p in model.parameters() if p.requires_grad or not trained_only]
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return Model(sum(p.numel() for p in kept), largest)


def _accelerate(workload: Asked) -> int:
    """``accelerate estimate-memory``'s column "Training using Adam" for float32, without the Hub in between."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = workload.build()
    total, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total, "float32").values()))


def _grid_guide(workload: Asked) -> int:
    if workload.layers is None:
        raise NoAnswerError(f"{NOT_APPLICABLE}: layers of different sizes")
    return grid_guide(workload.batch_size, *workload.layers)


def _twin_guide(workload: Asked) -> int:
    step: Any = workload.step
    tensors = step.batch(workload.batch_size).values()
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return twin_guide(_counted(workload, trained_only=True).parameters, workload.models, batch_bytes)


def _kitsune(workload: Asked) -> int:
    """``predict_memory``; for token models with the shape that its own Hugging Face door takes: (length,)."""
    from kitsune.predict import predict_memory

    large = _counted(workload).parameters * FLOAT > LARGEST_REAL_MODEL
    with torch.device("meta" if large else "cpu"):
        model = workload.build()
    optimizer = workload.optimizer.lower()
    found = predict_memory(model, workload.sample_shape(), batch_size=workload.batch_size, optimizer=optimizer)
    return int(found.total_bytes)


def built(workload: str) -> Any:
    """The model of this workload, for tools that ask for a function by its name."""
    return workloads()[workload].build()


def _preflight(workload: Asked) -> int:
    """``estimate --model NAME`` where its table has the model, else ``--model module:factory``.

    The latter runs the model on the meta device, with token ids or a square picture.
    """
    from torch_preflight.vram.archdb import lookup, profile_from_entry
    from torch_preflight.vram.costmodel import estimate
    from torch_preflight.vram.providers.meta import profile
    from torch_preflight.vram.types import OptimizerKind, RunConfig

    shape = workload.sample_shape()
    config = RunConfig(
        batch_size=workload.batch_size,
        seq_len=shape[0] if len(shape) == 1 else None,
        image_size=shape[-1] if len(shape) == 3 else None,
        optimizer=OptimizerKind(workload.optimizer.lower()),
    )
    name = next(name for name, one in workloads().items() if one.title == workload.title)
    entry = lookup({"llama7b": "llama-2-7b"}.get(name, name))
    if entry is not None:
        return int(estimate(profile_from_entry(entry), config).breakdown.total)
    found = profile(f"{__name__}:{built.__name__}", config, {"workload": name})
    if found.activation_bytes_per_sample is None:
        raise NoAnswerError("it could not run the model's forward")
    return int(estimate(found, config).breakdown.total)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("vram_guard", _vram_guard),
        Tool("MemTracker", tracked_peak, "torch.distributed._tools.mem_tracker", "a newer torch"),
        Tool("DeepSpeed ZeRO-2", lambda workload: deepspeed_zero2(_counted(workload))),
        Tool("DeepSpeed ZeRO-3", lambda workload: deepspeed_zero3(_counted(workload))),
        Tool("Accelerate", _accelerate, "accelerate", "pip install accelerate"),
        Tool("guide: grid", _grid_guide),
        Tool("guide: twin", _twin_guide),
        Tool("torch-kitsune", _kitsune, "kitsune.predict", "pip install torch-kitsune"),
        Tool("torch-preflight", _preflight, "torch_preflight.vram", "pip install torch-preflight"),
    )
}
