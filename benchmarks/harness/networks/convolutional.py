"""Convolutional networks, written out so that no benchmark needs torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from benchmarks.harness.networks.blocks import Blocks


def conv_bn(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Convolution, batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def small_cnn(checkpointing: bool) -> nn.Module:
    """VGG-like: four stages of two 3x3 convolutions, 64 to 512 channels, for images of 96 x 96."""
    stages: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        stages.append(nn.Sequential(conv_bn(channels, width), conv_bn(width, width), nn.MaxPool2d(2)))
        channels = width
    head = (nn.Flatten(), nn.Linear(512 * 6 * 6, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, 100))
    return nn.Sequential(Blocks(*stages, checkpointing=checkpointing), *head)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with batch norm: three scales down, three up, 32 to 256 channels."""

    def __init__(self, checkpointing: bool = False, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            Blocks(conv_bn(i, o), conv_bn(o, o), checkpointing=checkpointing)
            for i, o in zip([width, *widths], widths, strict=False)
        )
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(
            Blocks(conv_bn(2 * w, w), conv_bn(w, w), checkpointing=checkpointing) for w in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skipped = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        for rise, block, skip in zip(self.rise, self.up, reversed(skipped[:-1]), strict=True):
            x = block(torch.cat([skip, rise(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


class SpectralConv(nn.Module):
    """Multiplication of the lowest modes in Fourier space (Li et al. 2021, Fourier neural operator)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # half precision has no complex products
            spectrum = torch.fft.rfft2(x.float())
            result = torch.zeros_like(spectrum)
            low, high = torch.view_as_complex(self.weight)
            m = self.modes
            result[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
            result[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], high)
            grid: Tensor = torch.fft.irfft2(result, s=x.shape[-2:])
            return grid


class FNOBlock(nn.Module):
    """Spectral convolution beside a pointwise one."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.spectral = SpectralConv(width, modes)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.spectral(x) + self.local(x))


def fno(checkpointing: bool, width: int = 32, modes: int = 12) -> nn.Module:
    """Four Fourier layers on a grid of 128 x 128."""
    blocks = Blocks(*(FNOBlock(width, modes) for _ in range(4)), checkpointing=checkpointing)
    return nn.Sequential(nn.Conv2d(3, width, 1), blocks, nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 3, 1))


class VideoNet(nn.Module):
    """A 3D CNN over (B, 3, T, H, W) whose frames an LSTM reads in turn."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for outputs in (width, 2 * width, 4 * width):
            conv = nn.Conv3d(channels, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True), nn.MaxPool3d((1, 2, 2))]
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.lstm = nn.LSTM(channels, 256, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(256, 50)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.features(x).mean((-2, -1)).transpose(1, 2)
        return self.head(self.lstm(frames)[0][:, -1])  # type: ignore[no-any-return]


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
    """25,557,032 parameters: table 1 of "Deep Residual Learning for Image Recognition", strides in 3x3 convolutions."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, depth, stride in zip((64, 128, 256, 512), (3, 4, 6, 3), (1, 2, 2, 2), strict=True):
        for index in range(depth):
            layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
