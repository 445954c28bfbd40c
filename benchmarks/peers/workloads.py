"""The training steps that every estimator is asked about. Random weights, nothing is downloaded.

Five of them were run by xMem's authors on real GPUs (see benchmarks/published/data/SOURCES.md): float32, 128
tokens, the model's outputs referenced into the next iteration, gradients freed before the forward. Their measured
peak is NVML's use of the whole device less its first sample: what the allocator reserved, and what libraries took on
top.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.networks import NETWORKS
from benchmarks.models import CASES

CONFIGS = Path(__file__).parents[1] / "published" / "data" / "xmem_models.json"


class Measurement(NamedTuple):
    """A published peak in bytes, and the GPU it was measured on."""

    peak: int
    gpu: str
    compute_capability: tuple[int, int]


class Layers(NamedTuple):
    """The sizes that guide 000's formula asks for, for networks of equal layers."""

    sequence: int
    height: int
    width: int
    hidden: int
    number: int


@dataclass
class Workload:
    """One training step: model, batch, loss, AdamW or Adam, float32.

    Attributes:
        models: how many models share ``build``: 2 with a frozen twin of equal size.
        layers: None where the layers are not alike.
        optimizer: a class of torch.optim.
        kept: what the user's loop keeps into the next iteration.
    """

    name: str
    title: str
    batch_size: int
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    forward: Callable[[Any, dict[str, Tensor]], Any]
    layers: Layers | None = None
    models: int = 1
    optimizer: str = "AdamW"
    measured: Measurement | None = None
    keeps_outputs: bool = False
    kept: list[Any] = field(default_factory=list)

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """The scalar to go backward from."""
        result = self.forward(model, batch)
        if self.keeps_outputs:
            self.kept[:] = [result]
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
        return loss

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """With foreach, as CUDA would choose by itself; given to every tool alike."""
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(parameters, lr=1e-3, foreach=True)
        return optimizer

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Of the first input, without the batch dimension."""
        return tuple(next(iter(self.batch(1).values())).shape[1:])


def _from_transformers(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        spec = json.loads(CONFIGS.read_text(encoding="utf-8"))[name]
        # transformers 4.51.3, with which it was measured, had no fused attention for T5.
        extra = {"attn_implementation": "eager"} if spec["class"].startswith("T5") else {}
        config = getattr(transformers, spec["config_class"])(**spec["config"], **extra)
        model: nn.Module = getattr(transformers, spec["class"])(config)
        return model

    return build


def _tokens_128(size: int) -> dict[str, Tensor]:
    ids = torch.zeros(size, 128, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _published(name: str, title: str, size: int, optimizer: str, layers: Layers, measured: Measurement) -> Workload:
    return Workload(
        name=name,
        title=f"{title}, {size} x 128, {optimizer}",
        batch_size=size,
        build=_from_transformers(name),
        batch=_tokens_128,
        forward=lambda model, batch: model(**batch),
        layers=layers,
        optimizer=optimizer,
        measured=measured,
        keeps_outputs=True,
    )


RTX_3060, RTX_4060 = ("RTX 3060", (8, 6)), ("RTX 4060", (8, 9))


def _vgg16() -> nn.Module:
    """Configuration D of Simonyan and Zisserman 2015, 138,357,544 parameters, as torchvision has it."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True)]
    head += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


def _images_86(size: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(size, 3, 86, 86), "y": torch.zeros(size, dtype=torch.long)}


def _published_vgg16() -> Workload:
    """The images of xMem are CIFAR-10 resized to 86 x 86."""
    return Workload(
        name="vgg16",
        title="VGG-16, 560 x 3 x 86 x 86, AdamW",
        batch_size=560,
        build=_vgg16,
        batch=_images_86,
        forward=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        measured=Measurement(11_274_289_152, *RTX_3060),
    )


def _from_bench(name: str, layers: Layers | None) -> Workload:
    case = CASES[name]
    return Workload(name, f"{case.title}, AdamW", case.batch_size, case.build, case.batch, case.loss, layers)


def _from_suite(name: str, title: str, size: int, layers: Layers | None, models: int = 1) -> Workload:
    network = NETWORKS[name]
    return Workload(
        name, f"{title}, AdamW", size, lambda: network.build(False), network.batch, network.loss, layers, models
    )


def workloads() -> dict[str, Workload]:
    """By name, in the order of the table."""
    every = (
        _published(
            "distilbert/distilgpt2",
            "DistilGPT-2",
            28,
            "AdamW",
            Layers(128, 1, 1, 768, 6),
            Measurement(6_920_601_600, *RTX_3060),
        ),
        _published(
            "facebook/opt-125m",
            "OPT-125M",
            31,
            "AdamW",
            Layers(128, 1, 1, 768, 12),
            Measurement(7_319_060_480, *RTX_4060),
        ),
        _published(
            "EleutherAI/gpt-neo-125M",
            "GPT-Neo-125M",
            8,
            "AdamW",
            Layers(128, 1, 1, 768, 12),
            Measurement(3_982_491_648, *RTX_4060),
        ),
        _published(
            "T5-small", "T5-small", 30, "Adam", Layers(128, 1, 1, 512, 12), Measurement(6_517_948_416, *RTX_3060)
        ),
        _published_vgg16(),
        _from_bench("gpt2", Layers(1024, 1, 1, 768, 12)),
        _from_bench("resnet50", None),
        _from_suite("unet", "U-Net, 32 x 3 x 128 x 128", 32, None),
        _from_suite("fno", "FNO, 16 x 3 x 128 x 128", 16, Layers(1, 128, 128, 32, 4)),
        _from_suite("lstm", "LSTM, 64 x 128", 64, Layers(128, 1, 1, 512, 2)),
        _from_suite("twins", "DiT and frozen twin, 32 x 4 x 32 x 32", 32, Layers(256, 1, 1, 384, 8), models=2),
        _from_bench("llama7b", Layers(2048, 1, 1, 4096, 32)),
    )
    return {each.name: each for each in every}
