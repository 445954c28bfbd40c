"""Three networks that configs name without saying where they are: a Fourier operator, a U-Net, a transformer.

They stand for the user's own network of that kind where only its name and its sizes are known. All map (N, C, H, W) to
the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from vram_guard.closed_form.calculator import Network

#: Channels of the input where the number is not given; they hardly count compared with the hidden ones.
CHANNELS = 3
#: Fourier modes in each direction (Li et al. 2021, arXiv:2010.08895, section 5: 12 for two-dimensional problems).
MODES = 12
#: Width of a head and of the inner layer, as multiples (Vaswani et al. 2017).
HEAD, INNER = 64, 4


class SpectralLayer(nn.Module):
    """One Fourier layer: a linear map of the lowest modes beside a 1 x 1 convolution (Li et al. 2021, figure 2)."""

    def __init__(self, width: int, modes: int = MODES) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.zeros(2, width, width, modes, modes, 2))
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width, H, W) to the same."""
        height, width = x.shape[-2:]
        spectrum = torch.fft.rfft2(x.float())
        rows, columns = min(self.modes, height // 2), min(self.modes, width // 2 + 1)
        out = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)[..., :rows, :columns]
        out[..., :rows, :columns] = torch.einsum("nixy,ioxy->noxy", spectrum[..., :rows, :columns], weight[0])
        out[..., -rows:, :columns] = torch.einsum("nixy,ioxy->noxy", spectrum[..., -rows:, :columns], weight[1])
        return functional.gelu(torch.fft.irfft2(out, s=(height, width)).to(x.dtype) + self.local(x))


def fourier_operator(width: int, layers: int) -> nn.Module:
    """A Fourier neural operator of ``layers`` layers of ``width`` channels."""
    body = [SpectralLayer(width) for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(CHANNELS, width, 1), *body, nn.Conv2d(width, CHANNELS, 1))


class ResidualBlock(nn.Module):
    """Two normalised 3 x 3 convolutions around a shortcut (Ho et al. 2020, appendix B)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_normalised(before), nn.Conv2d(before, after, 3, padding=1), *_normalised(after))
        self.last = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, before, H, W) to (N, after, H, W)."""
        out: Tensor = self.shortcut(x) + self.last(self.inner(x))
        return out


class UNet(nn.Module):
    """A U-Net of about ``layers`` residual blocks: half of them down, half up; a scale for each two of a half.

    Channels double with each scale, up to four times the first ones.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        scales = max(1, min(4, layers // 4))
        widths = [width * min(2**scale, 4) for scale in range(scales)]
        blocks = max(1, layers // (2 * scales))
        self.first = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for before, after in zip([width, *widths], widths, strict=False):
            rest = [ResidualBlock(after, after) for _ in range(blocks - 1)]
            self.down.append(nn.Sequential(ResidualBlock(before, after), *rest))
        for before, after in zip([*widths[::-1][:1], *widths[::-1]], widths[::-1], strict=False):
            rest = [ResidualBlock(after, after) for _ in range(blocks - 1)]
            self.up.append(nn.Sequential(ResidualBlock(before + after, after), *rest))
        self.last = nn.Conv2d(width, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same; sides that do not halve evenly are rounded down and put back."""
        x = self.first(x)
        kept = []
        for index, blocks in enumerate(self.down):
            x = blocks(functional.avg_pool2d(x, 2, ceil_mode=True) if index else x)
            kept.append(x)
        for blocks in self.up:
            beside = kept.pop()
            if x.shape[-2:] != beside.shape[-2:]:
                x = functional.interpolate(x, beside.shape[-2:])
            x = blocks(torch.cat([x, beside], dim=1))
        out: Tensor = self.last(x)
        return out


class Transformer(nn.Module):
    """Self-attention over all points of the input, ``layers`` layers of ``width``; patches of one point."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        heads = max(1, width // HEAD)
        self.first = nn.Conv2d(CHANNELS, width, 1)
        layer = nn.TransformerEncoderLayer(width, heads, INNER * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same."""
        tokens = self.first(x).flatten(2).transpose(1, 2)
        out: Tensor = self.last(self.layers(tokens)).transpose(1, 2).unflatten(2, x.shape[-2:])
        return out


EXAMPLES: dict[str, Callable[[int, int], nn.Module]] = {
    "fno": fourier_operator,
    "unet": UNet,
    "ddpm": UNet,
    "transformer": Transformer,
}


def example(name: str, network: Network) -> Callable[[], nn.Module]:
    """A constructor of the example network with these sizes.

    Raises:
        KeyError: there is no example of that name.
    """
    return partial(EXAMPLES[name.lower()], network.hidden_dim, network.num_layers)


def _normalised(channels: int) -> tuple[nn.Module, nn.Module]:
    groups = next(count for count in (32, 16, 8, 4, 2, 1) if channels % count == 0)
    return nn.GroupNorm(groups, channels), nn.SiLU()
