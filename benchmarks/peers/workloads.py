"""The training steps that every estimator is asked about. Random weights, nothing is downloaded.

Five of them were run by xMem's authors on real GPUs (see benchmarks/published/data/SOURCES.md): float32, 128
tokens, the model's outputs referenced into the next iteration, gradients freed before the forward. Their measured
peak is NVML's use of the whole device less its first sample: what the allocator reserved, and what libraries took on
top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.harness import workloads as whole
from benchmarks.harness.networks import batches, convolutional, language
from benchmarks.harness.workloads import Workload, of_suite, step_of
from benchmarks.published import xmem
from vram_guard.budget.catalogue import find_gpu


class Measurement(NamedTuple):
    """A published peak in bytes, and the GPU it was measured on."""

    peak: int
    gpu: str
    compute_capability: tuple[int, int]


class Layers(NamedTuple):
    """The sizes that the grid guide's formula asks for, for networks of equal layers."""

    sequence: int
    height: int
    width: int
    hidden: int
    number: int


@dataclass(frozen=True)
class Asked(Workload):
    """One training step in float32 with AdamW or Adam, and what else the estimators need.

    Attributes:
        layers: None where the layers are not alike.
        models: how many models share the parameters that are trained: 2 with a frozen twin of equal size.
        optimizer: a class of torch.optim.
    """

    layers: Layers | None = None
    models: int = 1
    optimizer: str = "AdamW"
    measured: Measurement | None = None

    def sample_shape(self) -> tuple[int, ...]:
        """Of the first input, without the batch dimension."""
        step: Any = self.step
        return tuple(next(iter(step.batch(1).values())).shape[1:])


#: As CUDA would choose by itself; given to every tool alike.
FOREACH = {"lr": 1e-3, "foreach": True}


def _measured(model: str, size: int, optimizer: str, gpu: str) -> Measurement:
    wanted = (model, str(size), optimizer)
    rows = [row for row in xmem.all_rows() if (row["model"], row["batch_size"], row["optimizer"]) == wanted]
    row = next(row for row in rows if gpu in row["gpu_name"])
    return Measurement(int(row["ground_bytes"]), gpu, find_gpu(xmem.CARDS[gpu]).compute_capability)


def _published(model: str, title: str, size: int, gpu: str, layers: Layers, optimizer: str = "AdamW") -> Asked:
    kept = batches.KeptOutputs()
    step = step_of(language.published(model), batches.whole_sequences(xmem.LENGTH), kept, optimizer, **FOREACH)
    return Asked(
        f"{title}, {size} x 128, {optimizer}",
        size,
        step,
        layers=layers,
        optimizer=optimizer,
        measured=_measured(model, size, optimizer, gpu),
    )


def _vgg16() -> Asked:
    """The images of xMem are CIFAR-10 resized to 86 x 86."""
    images = batches.classified(3, xmem.SIDE, xmem.SIDE, classes=1000)
    step = step_of(convolutional.vgg16, images, batches.class_loss, **FOREACH)
    return Asked("VGG-16, 560 x 3 x 86 x 86, AdamW", 560, step, measured=_measured("VGG16", 560, "AdamW", "RTX 3060"))


def _of_benchmark(name: str, layers: Layers | None = None) -> Asked:
    known = whole.WORKLOADS[name]
    return Asked(f"{known.title}, AdamW", known.batch_size, known.step, layers=layers)


def _of_suite(name: str, title: str, size: int, layers: Layers | None = None, models: int = 1) -> Asked:
    return Asked(f"{title}, AdamW", size, of_suite(name, **FOREACH), layers=layers, models=models)


def workloads() -> dict[str, Asked]:
    """By name, in the order of the table."""
    return {
        "distilbert/distilgpt2": _published(
            "distilbert/distilgpt2", "DistilGPT-2", 28, "RTX 3060", Layers(128, 1, 1, 768, 6)
        ),
        "facebook/opt-125m": _published("facebook/opt-125m", "OPT-125M", 31, "RTX 4060", Layers(128, 1, 1, 768, 12)),
        "EleutherAI/gpt-neo-125M": _published(
            "EleutherAI/gpt-neo-125M", "GPT-Neo-125M", 8, "RTX 4060", Layers(128, 1, 1, 768, 12)
        ),
        "T5-small": _published("T5-small", "T5-small", 30, "RTX 3060", Layers(128, 1, 1, 512, 12), "Adam"),
        "vgg16": _vgg16(),
        "gpt2": _of_benchmark("gpt2", Layers(1024, 1, 1, 768, 12)),
        "resnet50": _of_benchmark("resnet50"),
        "unet": _of_suite("unet", "U-Net, 32 x 3 x 128 x 128", 32),
        "fno": _of_suite("fno", "FNO, 16 x 3 x 128 x 128", 16, Layers(1, 128, 128, 32, 4)),
        "lstm": _of_suite("lstm", "LSTM, 64 x 128", 64, Layers(128, 1, 1, 512, 2)),
        "twins": _of_suite("twins", "DiT and frozen twin, 32 x 4 x 32 x 32", 32, Layers(256, 1, 1, 384, 8), models=2),
        "llama7b": _of_benchmark("llama7b", Layers(2048, 1, 1, 4096, 32)),
    }
