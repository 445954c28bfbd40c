"""The three models of the benchmark: random weights, published shapes, AdamW.

Nothing is downloaded. GPT-2 small and Llama-7B are transformers' default configurations; ResNet-50 is written
out here after table 1 of "Deep Residual Learning for Image Recognition" (stride in the 3x3 convolution, as
torchvision has it), so that the benchmark needs no torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One model with its batch, as every tool of the benchmark is given it."""

    title: str
    batch_size: int
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[Any, Any], Tensor]

    def prepare(self) -> None:
        """Import what building the model imports lazily, so that no tool's time contains it."""
        with torch.device("meta"):
            self.build()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with ``foreach=True``: what CUDA would choose, given to every tool alike."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the output has ``4 * width`` channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


def resnet50() -> nn.Module:
    """25,557,032 parameters: stages of 3, 4, 6 and 3 bottlenecks, 1000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def gpt2_small() -> nn.Module:
    """124,439,808 parameters, up to 1024 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def llama_7b() -> nn.Module:
    """6,738,415,616 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False))


def _tokens(length: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(size: int) -> dict[str, Tensor]:
        tokens = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": torch.zeros(size, length, dtype=torch.long)}

    return batch


def _images(size: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(size, 3, 224, 224), "y": torch.zeros(size, dtype=torch.long)}


def _language_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _image_loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


CASES = {
    "gpt2": Case("GPT-2 small, 8 x 1024", 8, gpt2_small, _tokens(1024), _language_loss),
    "resnet50": Case("ResNet-50, 64 x 3 x 224 x 224", 64, resnet50, _images, _image_loss),
    "llama7b": Case("Llama-7B, 1 x 2048", 1, llama_7b, _tokens(2048), _language_loss),
}
