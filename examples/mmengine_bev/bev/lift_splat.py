"""Lift, Splat (Philion and Fidler, ECCV 2020, arXiv 2008.05711), with a small backbone.

Every feature of every camera is lifted along its ray to all depths, weighted by a predicted distribution over them, and
splatted onto a map seen from above, where a small network segments the cars. Memory goes into the lifted features:
cameras x depths x height x width x channels of them for each sample.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional


@MODELS.register_module()
class CamerasPreprocessor(BaseDataPreprocessor):
    """Stacks samples and brings pictures to zero mean and unit variance, on the device."""

    def __init__(self, mean: float = 110.0, std: float = 45.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean, self.std = mean, std

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        data = self.cast_data(data)
        pictures = torch.stack(list(data["inputs"])).float().sub_(self.mean).div_(self.std)
        return {**data, "inputs": pictures, "calibration": torch.stack(list(data["calibration"]))}


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


def stage(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """A convolution that may shrink, and ``depth`` blocks."""
    entry = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(entry, nn.BatchNorm2d(width), nn.ReLU(inplace=True), *(Block(width) for _ in range(depth)))


@MODELS.register_module()
class LiftSplat(BaseModel):
    """Cameras to a map of cars.

    Args:
        image_size: height and width of the pictures.
        widths: channels of the backbone's stages, each of which halves the pictures.
        depth: blocks in each stage.
        channels: of a lifted feature.
        distances: metres: first, last (exclusive) and step of the depths.
        reach: metres from the ego car to the edges of the map.
        cells: of the map along each side.
        map_width: channels of the network on the map.
        car_weight: how much a cell with a car counts in the loss; most cells have none.
    """

    def __init__(  # noqa: PLR0917 - configs name them
        self,
        image_size: tuple[int, int],
        widths: tuple[int, ...] = (16, 32, 64),
        depth: int = 1,
        channels: int = 32,
        distances: tuple[float, float, float] = (2.0, 26.0, 1.0),
        reach: float = 20.0,
        cells: int = 50,
        map_width: int = 32,
        car_weight: float = 4.0,
        data_preprocessor: Any = None,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor or {"type": "CamerasPreprocessor"}, init_cfg=init_cfg)
        steps = torch.arange(*distances)
        self.channels, self.reach, self.cells = channels, reach, cells
        self.backbone = nn.Sequential(
            *(stage(inputs, width, depth, 2) for inputs, width in zip((3, *widths), widths, strict=False))
        )
        self.lift_head = nn.Conv2d(widths[-1], len(steps) + channels, 1)
        self.map_encoder = stage(channels, map_width, 2, 1)
        self.segment_head = nn.Conv2d(map_width, 1, 1)
        stride = 2 ** len(widths)
        self.register_buffer("frustum", _frustum(image_size, stride, steps), persistent=False)
        self.register_buffer("car_weight", torch.tensor(car_weight), persistent=False)

    def forward(self, inputs: Tensor, calibration: Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Pictures (samples, cameras, 3, height, width) and 3 x 4 matrices to logits (samples, cells, cells)."""
        lifted = self._lift(inputs.flatten(0, 1))
        logits = self._segment(self._splat(lifted, calibration))
        if mode == "tensor":
            return logits
        if mode == "predict":
            for sample, logit in zip(data_samples, logits, strict=True):
                sample.pred_map = logit > 0
            return data_samples
        truth = torch.stack([sample.gt_map for sample in data_samples]).float()
        loss = functional.binary_cross_entropy_with_logits(logits.float(), truth, pos_weight=self.car_weight)
        return {"loss_map": loss}

    def _lift(self, pictures: Tensor) -> Tensor:
        """(pictures, depths, height, width, channels)."""
        found = self.lift_head(self.backbone(pictures))
        depths, features = found.split([found.shape[1] - self.channels, self.channels], dim=1)
        return depths.softmax(1).to(features.dtype).unsqueeze(-1) * features.permute(0, 2, 3, 1).unsqueeze(1)

    def _splat(self, lifted: Tensor, calibration: Tensor) -> Tensor:
        """The sum of what falls into each cell; (samples, channels, cells, cells)."""
        samples = calibration.shape[0]
        places = self._cells_of(calibration).flatten(1)
        # One cell more, for what falls outside the map: no size depends on where the points are. Each sample has a
        # canvas of its own, so that it is seen that none meets another.
        canvas = lifted.new_zeros(samples, self.cells**2 + 1, self.channels)
        found = lifted.reshape(samples, -1, self.channels)
        canvas = canvas.scatter_add(1, places.unsqueeze(-1).expand_as(found), found)
        return canvas[:, :-1].view(samples, self.cells, self.cells, self.channels).permute(0, 3, 1, 2)

    @torch.no_grad()
    def _cells_of(self, calibration: Tensor) -> Tensor:
        """The cell of every lifted feature; (samples, cameras, depths, height, width)."""
        points = torch.einsum("scij,dhwj->scdhwi", calibration, self.frustum)
        cells = ((points[..., :2] + self.reach) * (self.cells / (2 * self.reach))).floor().long()
        inside = ((cells >= 0) & (cells < self.cells)).all(-1) & (points[..., 2].abs() < 5.0)
        return torch.where(inside, cells[..., 0] * self.cells + cells[..., 1], self.cells**2)

    def _segment(self, seen_from_above: Tensor) -> Tensor:
        logits: Tensor = self.segment_head(self.map_encoder(seen_from_above)).squeeze(1)
        return logits


def _frustum(image_size: tuple[int, int], stride: int, distances: Tensor) -> Tensor:
    """(column * depth, row * depth, depth, 1) of every feature; (depths, height, width, 4)."""
    height, width = (side // stride for side in image_size)
    rows = (torch.arange(height) + 0.5) * stride
    columns = (torch.arange(width) + 0.5) * stride
    depth, row, column = torch.meshgrid(distances, rows, columns, indexing="ij")
    return torch.stack([column * depth, row * depth, depth, torch.ones_like(depth)], dim=-1)
