"""Camera-to-BEV segmentation of rendered street scenes; imported by the configs' ``custom_imports``."""

from __future__ import annotations

from bev.dataset import RenderedScenes
from bev.lift_splat import CamerasPreprocessor, LiftSplat
from bev.metric import VehicleIoU

__all__ = ["CamerasPreprocessor", "LiftSplat", "RenderedScenes", "VehicleIoU"]
