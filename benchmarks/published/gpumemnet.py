"""Predict the table of GPUMemNet's paper: what nvidia-smi showed for the whole card while a network trained.

    python benchmarks/published/gpumemnet.py [--only WORD ...] [--json FILE]

The recipe, as far as the paper states it: ImageNet, 224 x 224, float32, Adam. The card is an A100 of 40 GB, the
networks are taken to be torchvision's and timm's; release of torch, search for the fastest cuDNN algorithm and data
loading on the GPU are not stated. Ours is the reserved peak and the catalogue's CUDA context. What cannot be rebuilt:
the transformers (neither sequence length nor task is given) and Inception (at 224 x 224 its auxiliary classifier
cannot run).
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import NotReproducible, Row
from source import Source, main
from torch.nn import functional

from vram_guard import Budget, TrainingStep
from vram_guard.simulate.tracing.run import run_step

DATA = Path(__file__).parent / "data"
CARD, CAPABILITY = "A100 40GB", (8, 0)
SIDE, CLASSES = 224, 1000
TOOLS = ("gpumemnet", "faketensor", "horus")

#: The paper's names -> library and constructor.
NETWORKS = {
    "vgg16": ("torchvision", "vgg16"),
    "resnet50": ("torchvision", "resnet50"),
    "Xception": ("timm", "legacy_xception"),
    "mobilenetV2": ("torchvision", "mobilenet_v2"),
    "efficientnet": ("torchvision", "efficientnet_b0"),
}

#: The others, and why they are left out.
LEFT_OUT = {"inception": "at 224 x 224 its auxiliary classifier cannot run; another size or form is not stated"}
UNSTATED = "neither sequence length nor task of the transformers is stated"


def rows() -> list[dict[str, str]]:
    """All rows, in the table's order."""
    with (DATA / "gpumemnet.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def name(row: dict[str, str]) -> str:
    """How a row is called in the table."""
    return f"{row['model']} {row['batch_size']}"


def _constructor(model: str) -> Callable[[], Any]:
    if model not in NETWORKS:
        raise NotReproducible(LEFT_OUT.get(model, UNSTATED))
    library, constructor = NETWORKS[model]
    try:
        import timm
        from torchvision import models
    except ImportError:
        raise NotReproducible("torchvision or timm is not installed") from None
    if library == "timm":
        return lambda: timm.create_model(constructor, pretrained=False, num_classes=CLASSES)
    return lambda: getattr(models, constructor)(num_classes=CLASSES)


def predict(row: dict[str, str]) -> list[Row]:
    """The reserved peak and the context."""
    build, size = _constructor(row["model"]), int(row["batch_size"])

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(samples, 3, SIDE, SIDE, device="meta"), torch.zeros(samples, dtype=torch.long)

    def loss(model: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(inputs[0]), inputs[1])

    step = TrainingStep(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=torch.optim.Adam,
        zero_grad="before_forward",
    )
    start = time.perf_counter()
    timeline = run_step(step, size, CAPABILITY)
    used = timeline.at(size).peak_reserved + Budget.of(CARD, margin=0).context
    seconds = time.perf_counter() - start
    tools = {tool: int(float(row[f"{tool}_mib"]) * 2**20) for tool in TOOLS if row[f"{tool}_mib"]}
    measured = int(row["measured_mib"]) * 2**20
    return [Row(TABLE.title, name(row), measured, used, timeline.tier, seconds, tools=tools)]


TABLE = Source("GPUMemNet's table", rows, name, predict)


if __name__ == "__main__":
    raise SystemExit(main(table=TABLE))
