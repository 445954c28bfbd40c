"""Monthly sea-surface temperatures of the tropics, April 2006 to September 2010, as the package iris-sample-data ships.

Real data: OSTIA, the Met Office's analysis of satellites, ships and buoys. 54 monthly means on 18 latitudes (5 degrees
south to 4.4 north) and 432 longitudes (all around). British Crown copyright 2018, Open Government Licence. Nothing is
downloaded when this runs.
"""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import iris_sample_data
import torch
from torch import Tensor
from torch.utils.data import Dataset

#: The last months are never trained on.
HELD_OUT_MONTHS = 12
FIRST_MONTH = 3  # April, counted from 0

#: Kelvin: what the network sees is (temperature - MIDDLE) / SPREAD.
MIDDLE, SPREAD = 300.0, 2.0


def load_maps() -> tuple[Tensor, Tensor]:
    """Temperatures (54, 18, 432) in kelvin, 0 on land, and where there is sea in every month (18, 432)."""
    with h5py.File(Path(iris_sample_data.path) / "ostia_monthly.nc") as file:
        kelvin = torch.tensor(file["surface_temperature"][:])
    sea = (kelvin < 1e10).all(dim=0)  # the file marks land with 1e20
    return torch.where(sea, kelvin, 0.0), sea


class Months(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Windows of maps: (months, 4, 18, columns), the change until the next month (18, columns), the sea (18, columns).

    Args:
        targets: indices of the months to be predicted.
        months: how many maps the network sees before each.
        columns: width of a window; the maps go round the earth, and so do the windows.
        stride: columns from one window to the next.
    """

    def __init__(self, targets: range, months: int, columns: int, stride: int) -> None:
        kelvin, sea = load_maps()
        inputs = _channels(kelvin, sea)
        self.samples = []
        for target in targets:
            change = (kelvin[target] - kelvin[target - 1]) / SPREAD
            for start in range(0, kelvin.shape[-1], stride):
                around = torch.arange(start, start + columns) % kelvin.shape[-1]
                window = inputs[target - months : target][..., around].contiguous()
                self.samples.append((window, change[:, around], sea[:, around].float()))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.samples[index]


def training_and_held_out(months: int, columns: int, stride: int) -> tuple[Months, Months]:
    """Overlapping windows of the earlier months, and each place once of the last ones."""
    last = len(load_maps()[0])
    first_held_out = last - HELD_OUT_MONTHS
    return (
        Months(range(months, first_held_out), months, columns, stride),
        Months(range(first_held_out, last), months, columns, columns),
    )


def _channels(kelvin: Tensor, sea: Tensor) -> Tensor:
    """The network's inputs for every month: (54, 4, 18, 432)."""
    temperature = torch.where(sea, (kelvin - MIDDLE) / SPREAD, 0.0)
    angles = (torch.arange(len(kelvin)) + FIRST_MONTH) * (2 * math.pi / 12)
    clock = [wave[:, None, None].expand_as(kelvin) for wave in (angles.sin(), angles.cos())]
    return torch.stack([temperature, sea.expand_as(kelvin).float(), *clock], dim=1)
