"""The networks of the suite: random weights, a batch of any size and a loss for each. Nothing is downloaded.

Inputs are random and weights freshly initialised, so that half precision neither overflows nor divides by nothing;
the samples of a batch are copies of one (their values decide nothing about memory, and making them is quick).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.utils.checkpoint import checkpoint

from benchmarks.models import gpt2_small, resnet50

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """One network as cases use it.

    Attributes:
        build: the model; with True, one that checkpoints its blocks' activations.
        batch: batch size -> batch.
        loss: (model, batch) -> scalar.
        is_image: whether ``batch["x"]`` is (B, C, H, W) and may be in channels_last.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    is_image: bool = False


def _random(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


def _copies(sample: Tensor, size: int) -> Tensor:
    return sample.repeat(size, *(1 for _ in sample.shape[1:]))


def _tokens(length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def _classified(*shape: int, classes: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        return {"x": _copies(_random(*shape), size), "y": torch.arange(size) % classes}

    return batch


def _class_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _own_loss(model: Any, batch: Batch) -> Tensor:
    """Models of transformers compute the loss themselves."""
    loss: Tensor = model(**batch).loss
    return loss


def _regression(*shape: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        return {"x": _copies(_random(*shape), size), "y": _copies(_random(*shape), size)}

    return batch


def _squared_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Blocks(nn.Module):
    """Modules in a row, each of them checkpointed on request."""

    def __init__(self, *modules: nn.Module, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


# --- convolutions ---------------------------------------------------------------------------------------------


def _conv_bn(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def small_cnn(checkpointing: bool) -> nn.Module:
    """VGG-like: four stages of two 3x3 convolutions, 64 to 512 channels, for images of 96 x 96."""
    stages: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        stages.append(nn.Sequential(_conv_bn(channels, width), _conv_bn(width, width), nn.MaxPool2d(2)))
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
            Blocks(_conv_bn(i, o), _conv_bn(o, o), checkpointing=checkpointing)
            for i, o in zip([width, *widths], widths, strict=False)
        )
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(
            Blocks(_conv_bn(2 * w, w), _conv_bn(w, w), checkpointing=checkpointing) for w in reversed(widths[:-1])
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


# --- sequences ------------------------------------------------------------------------------------------------


class RecurrentLM(nn.Module):
    """Embedding, two recurrent layers with dropout, projection to the vocabulary."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int = 512, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = kind(width, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])  # type: ignore[no-any-return]


def _language(length: int, vocabulary: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        ids = _copies(_tokens(length, vocabulary), size)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def _masked_language(length: int, vocabulary: int, padded: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        whole = _language(length, vocabulary)(size)
        whole["attention_mask"] = torch.ones(size, length, dtype=torch.long)
        whole["attention_mask"][:, length - padded :] = 0
        return whole

    return batch


def _next_token_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _checkpointed(model: Any, checkpointing: bool) -> nn.Module:
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    result: nn.Module = model
    return result


def _gpt2(checkpointing: bool) -> nn.Module:
    return _checkpointed(gpt2_small(), checkpointing)


def _bert(checkpointing: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return _checkpointed(BertForMaskedLM(BertConfig()), checkpointing)


def _llama(checkpointing: bool) -> nn.Module:
    """About 100 million parameters: 10 layers of width 768, grouped queries, SwiGLU, RMSNorm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32_000,
        use_cache=False,
    )
    return _checkpointed(LlamaForCausalLM(config), checkpointing)


def _vit(checkpointing: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return _checkpointed(ViTForImageClassification(ViTConfig()), checkpointing)


def _vit_batch(size: int) -> Batch:
    return {"pixel_values": _copies(_random(3, 224, 224), size), "labels": torch.arange(size) % 2}


# --- a diffusion transformer that learns from a frozen twin ---------------------------------------------------


class DiTBlock(nn.Module):
    """Attention and MLP, both modulated by the time step (Peebles and Xie 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(size, length, width))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """Patches of a (B, 4, 32, 32) latent, predicted noise of the same shape."""

    def __init__(self, width: int = 384, depth: int = 8, heads: int = 6, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 256, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2) + self.position
        condition = self.time(time[:, None])
        for block in self.blocks:
            if self.checkpointing:
                hidden = checkpoint(block, hidden, condition, use_reentrant=False)
            else:
                hidden = block(hidden, condition)
        return F.pixel_shuffle(self.head(self.norm(hidden)).transpose(1, 2).unflatten(2, (16, 16)), 2)


class Twins(nn.Module):
    """A student and its frozen teacher: two models in memory, gradients and optimizer state for one."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.student = DiT(checkpointing=checkpointing)
        self.teacher = DiT().requires_grad_(False)


def _twin_batch(size: int) -> Batch:
    return {"x": _copies(_random(4, 32, 32), size), "time": torch.linspace(0, 1, size)}


def _twin_loss(model: Any, batch: Batch) -> Tensor:
    noisy = batch["x"] + torch.randn_like(batch["x"]) * batch["time"][:, None, None, None]
    with torch.no_grad():
        wanted = model.teacher(noisy, batch["time"])
    return F.mse_loss(model.student(noisy, batch["time"]), wanted)


NETWORKS: dict[str, Network] = {
    "resnet50": Network(lambda _: resnet50(), _classified(3, 224, 224, classes=1000), _class_loss, is_image=True),
    "small_cnn": Network(small_cnn, _classified(3, 96, 96, classes=100), _class_loss, is_image=True),
    "unet": Network(UNet, _regression(3, 128, 128), _squared_loss, is_image=True),
    "fno": Network(fno, _regression(3, 128, 128), _squared_loss),
    "video": Network(lambda _: VideoNet(), _classified(3, 8, 64, 64, classes=50), _class_loss),
    "lstm": Network(lambda _: RecurrentLM(nn.LSTM), _language(128, 10_000), _next_token_loss),
    "gru": Network(lambda _: RecurrentLM(nn.GRU), _language(128, 10_000), _next_token_loss),
    "gpt2": Network(_gpt2, _language(512, 50_257), _own_loss),
    "bert": Network(_bert, _masked_language(256, 30_522, padded=56), _own_loss),
    "llama": Network(_llama, _language(512, 32_000), _own_loss),
    "vit": Network(_vit, _vit_batch, _own_loss),
    "twins": Network(Twins, _twin_batch, _twin_loss),
}
