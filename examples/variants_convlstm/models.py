"""Four sizes of a network that looks at months of maps and says what the next one will be.

Every one takes (N, months, 4, H, W): temperature, sea mask, sine and cosine of the month; and gives the change of the
temperature until the next month, (N, H, W). Their last layers start from zero: untrained, they say "as last month".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CHANNELS = 4


class ConvLSTM(nn.Module):
    """An LSTM whose gates are 3 x 3 convolutions (Shi et al. 2015, equation 3, without the peepholes)."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(CHANNELS + hidden, 4 * hidden, 3, padding=1)
        self.head = _from_zero(nn.Linear(hidden, 1))

    def forward(self, maps: Tensor) -> Tensor:
        size, _, _, height, width = maps.shape
        state = memory = maps.new_zeros(size, self.hidden, height, width)
        for month in maps.unbind(1):
            let_in, forget, let_out, new = self.gates(torch.cat([month, state], dim=1)).chunk(4, dim=1)
            memory = forget.sigmoid() * memory + let_in.sigmoid() * new.tanh()
            state = let_out.sigmoid() * memory.tanh()
        change: Tensor = self.head(state.movedim(1, -1)).squeeze(-1)
        return change


class Cnn3dLstm(nn.Module):
    """3 x 3 x 3 convolutions over time and space, then an LSTM over the months of every pixel."""

    def __init__(self, widths: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((CHANNELS, *widths), widths, strict=False):
            layers += [nn.Conv3d(before, width, 3, padding=1), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        self.lstm = nn.LSTM(widths[-1], hidden, batch_first=True)
        self.head = _from_zero(nn.Linear(hidden, 1))

    def forward(self, maps: Tensor) -> Tensor:
        size, months, _, height, width = maps.shape
        features = self.convolutions(maps.transpose(1, 2))
        pixels = features.permute(0, 3, 4, 2, 1).reshape(size * height * width, months, -1)
        states, _ = self.lstm(pixels)
        change: Tensor = self.head(states[:, -1]).view(size, height, width)
        return change


#: From small to large.
CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "3dcnn_lstm_micro": lambda: Cnn3dLstm((8,), hidden=16),
    "3dcnn_lstm_lite": lambda: Cnn3dLstm((8, 16), hidden=24),
    "convlstm": ConvLSTM,
    "3dcnn_lstm": lambda: Cnn3dLstm((16, 32, 64), hidden=64),
}


def _from_zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
