"""Rendered scenes as an MMEngine dataset: pictures of all cameras, their calibration, and the map of cars."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmengine.structures import BaseDataElement

from bev.scenes import make_scene, occupied, render, surround


@DATASETS.register_module()
class RenderedScenes(BaseDataset):
    """Scenes by number; the same number is always the same scene.

    Args:
        scenes: how many.
        first: the number of the first one: other numbers for validation than for training.
        cameras: looking all around.
        image_size: height and width.
        reach: metres from the ego car to the edges of the map.
        cells: of the map along each side.
    """

    METAINFO: ClassVar[dict[str, Any]] = {"classes": ("vehicle",)}

    def __init__(
        self,
        scenes: int,
        first: int = 0,
        cameras: int = 4,
        image_size: tuple[int, int] = (64, 160),
        reach: float = 20.0,
        cells: int = 50,
        **kwargs: Any,
    ) -> None:
        self.scenes, self.first = scenes, first
        self.image_size, self.reach, self.cells = tuple(image_size), reach, cells
        self.cameras = surround(cameras, *image_size)
        self._rendered: dict[int, dict[str, Any]] = {}
        super().__init__(serialize_data=False, **kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{"scene": self.first + number} for number in range(self.scenes)]

    def prepare_data(self, idx: int) -> dict[str, Any]:
        if idx not in self._rendered:
            self._rendered[idx] = self._render(self.get_data_info(idx)["scene"])
        sample = self._rendered[idx]
        return {**sample, "data_samples": sample["data_samples"].clone()}

    def _render(self, scene: int) -> dict[str, Any]:
        cars = make_scene(scene, self.reach)
        pictures = np.stack([render(cars, camera, *self.image_size) for camera in self.cameras])
        sample = BaseDataElement(metainfo={"scene": scene})
        sample.gt_map = torch.from_numpy(occupied(cars, self.reach, self.cells))
        # A camera's 3 x 4 matrix takes (column * depth, row * depth, depth, 1) to the ego frame.
        unproject = [camera.rotation @ np.linalg.inv(camera.intrinsics) for camera in self.cameras]
        positions = np.stack([camera.position for camera in self.cameras])[:, :, None]
        matrices = np.concatenate([np.stack(unproject), positions], axis=2)
        return {
            "inputs": torch.from_numpy(pictures),
            "calibration": torch.from_numpy(matrices).float(),
            "data_samples": sample,
        }
