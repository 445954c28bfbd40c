"""Small models of the kinds that people train, each with its batch and loss; shared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vram_guard.step import TrainingStep


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class ConvNet(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Decoder(nn.Module):
    """A causal transformer with tied embeddings."""

    def __init__(self, width: int = 64, vocabulary: int = 199, layers: int = 2, length: int = 24) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(CausalBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class CausalBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(8, 16, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(fine)
        return self.out(torch.cat([fine, self.up(coarse)], 1))


class FourierLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 4, 4, dtype=torch.cfloat) * 0.02)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], self.weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


class FourierOperator(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.layers = nn.Sequential(FourierLayer(width), FourierLayer(width))
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.layers(self.lift(x)))


@dataclass(frozen=True)
class Architecture:
    """A model, how to make one batch of it, and its loss."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]

    def step(self, **settings: Any) -> TrainingStep:
        settings.setdefault("optimizer", adamw)
        settings.setdefault("model", self.model)
        return TrainingStep(batch=self.batch, loss=self.loss, **settings)


def _images(size: int) -> Callable[[int], Any]:
    return lambda b: (torch.randn(b, 3, size, size), torch.arange(b) % 10)


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_token(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _reconstruct(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def _tokens(length: int) -> Callable[[int], Tensor]:
    return lambda b: torch.arange(b * length).view(b, length) % 97


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("convnet", ConvNet, _images(32), _classify),
    Architecture("decoder", Decoder, _tokens(24), _next_token),
    Architecture("encoder", Encoder, lambda b: (_tokens(12)(b), torch.arange(b) % 5), _classify),
    Architecture("lstm", Recurrent, lambda b: (torch.randn(b, 7, 8), torch.arange(b) % 4), _classify),
    Architecture("gru", lambda: Recurrent(nn.GRU), lambda b: (torch.randn(b, 7, 8), torch.arange(b) % 4), _classify),
    Architecture("unet", UNet, lambda b: torch.randn(b, 3, 16, 16), _reconstruct),
    Architecture("fourier", FourierOperator, lambda b: torch.randn(b, 1, 16, 16), _reconstruct),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
