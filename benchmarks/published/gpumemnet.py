"""Predict the table of GPUMemNet's paper: what nvidia-smi showed for the whole card while a network trained.

The recipe, as far as the paper states it: ImageNet, 224 x 224, float32, Adam. The card is an A100 of 40 GB, the
networks are taken to be torchvision's and timm's; release of torch, search for the fastest cuDNN algorithm and data
loading on the GPU are not stated. Ours is the reserved peak and the catalogue's CUDA context. What cannot be rebuilt:
the transformers (neither sequence length nor task is given) and Inception (at 224 x 224 its auxiliary classifier
cannot run).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.networks.batches import shapes_of_images
from benchmarks.harness.pages import MIB
from benchmarks.harness.records import NotReproducible, Row
from benchmarks.published.source import Record, Source, predicted, records_of
from vram_guard import Budget, TrainingStep

CARD = "A100 40GB"
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


def predict(row: Record) -> list[Row]:
    """The reserved peak and the context."""
    size = int(row["batch_size"])
    step = TrainingStep(
        model=_constructor(row["model"]),
        batch=shapes_of_images(SIDE),
        loss=lambda model, inputs: torch.nn.functional.cross_entropy(model(inputs[0]), inputs[1]),
        optimizer=torch.optim.Adam,
        zero_grad="before_forward",
    )
    context = Budget.of(CARD, margin=0).context
    found = predicted(
        step,
        size,
        CARD,
        lambda timeline: {"predicted": timeline.at(size).peak_reserved + context},
        source=TABLE.title,
        name=TABLE.name(row),
        measured=int(row["measured_mib"]) * MIB,
        tools={tool: int(float(row[f"{tool}_mib"]) * MIB) for tool in TOOLS if row[f"{tool}_mib"]},
    )
    return [found]


TABLE = Source(
    "GPUMemNet's table",
    lambda: records_of("gpumemnet.csv"),
    lambda row: f"{row['model']} {row['batch_size']}",
    predict,
    environment="torchvision",
)

SOURCES = (TABLE,)
