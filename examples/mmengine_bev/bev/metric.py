"""Intersection over union of predicted and real cars."""

from __future__ import annotations

from typing import Any

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class VehicleIoU(BaseMetric):
    """Cells that are rightly said to hold a car, over those that do or are said to; in percent, over all scenes."""

    default_prefix = "bev"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for sample in data_samples:
            predicted, true = sample["pred_map"].bool(), sample["gt_map"].bool()
            self.results.append((int((predicted & true).sum()), int((predicted | true).sum())))

    def compute_metrics(self, results: list[tuple[int, int]]) -> dict[str, float]:
        both, either = (sum(column) for column in zip(*results, strict=True))
        return {"IoU": 100.0 * both / max(either, 1)}
