"""The bird's-eye view example: its scenes, its network, the comparison, and a short training by its tools/train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import GuardRunner  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mmengine_bev"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def environment():
    paths = [str(EXAMPLE), str(ROOT), str(ROOT / "integrations"), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def test_a_car_is_seen_where_the_map_has_it():
    from bev.scenes import Car, occupied, render, surround

    car = Car(x=10.0, y=0.0, yaw=0.0, size=(4.0, 2.0, 1.6), colour=np.array([255.0, 0.0, 0.0]))
    front, left, *_ = surround(4, 64, 160)
    red = [
        (picture[0] > 120) & (picture[1] < 100)
        for picture in (render([car], camera, 64, 160) for camera in (front, left))
    ]
    rows, columns = np.nonzero(red[0])
    assert columns.mean() == pytest.approx(80, abs=1.5), "straight ahead is the middle of the front camera"
    assert not red[1].any()
    cells = np.argwhere(occupied([car], reach=20.0, cells=50))
    metres = (cells + 0.5) * 0.8 - 20.0
    assert metres.mean(0) == pytest.approx([10.0, 0.0], abs=0.4)
    # Its rear edge on the road, 8 m ahead, lies where a pinhole camera puts it.
    focal, middle = front.intrinsics[0, 0], front.intrinsics[1, 2]
    assert rows.max() + 0.5 == pytest.approx(middle + focal * 1.6 / (8.0 - 0.5), abs=1.0)


def test_features_land_in_the_cells_they_look_at():
    """A feature lifted from the pixel of a car, to the car's distance, is splatted onto the car's cell."""
    from bev.lift_splat import LiftSplat
    from bev.scenes import surround

    model = LiftSplat(image_size=(64, 160))
    front = surround(4, 64, 160)[0]
    matrix = np.concatenate([front.rotation @ np.linalg.inv(front.intrinsics), front.position[:, None]], axis=1)
    cells = model._cells_of(torch.from_numpy(matrix).float()[None, None])[0, 0]
    depth, row, column = 7, 3, 10  # 9 m along the optical axis; rows and columns of 8 pixels
    assert model.frustum[depth, row, column, 2] == 9.0
    x = 9.0 + 0.5
    y = -((column + 0.5) * 8 - front.intrinsics[0, 2]) * 9.0 / front.intrinsics[0, 0]
    expected = int((x + 20) / 0.8) * 50 + int((y + 20) / 0.8)
    assert int(cells[depth, row, column]) == expected
    assert (cells <= 50 * 50).all()


def test_the_comparison(tmp_path):
    """Guide 004: batch 4, batch 8, batch 8 with FP16, side by side."""
    command = [
        *(sys.executable, "-m", "vram_guard.cli", "mmengine", "compare"),
        *(str(EXAMPLE / "configs" / "lift_splat_128x352_scenes.py"), "--gpu", "RTX 2060"),
        *("--batch-size", "4", "8", "--precision", "32-true", "16-mixed"),
    ]
    run = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=True, env=environment(), cwd=tmp_path
    )
    answer = json.loads(run.stdout[run.stdout.index("{") :])
    rows = {(row["batch_size"], row["precision"]): row for row in answer["configurations"]}
    four, eight, both = rows[4, "32-true"], rows[8, "32-true"], rows[8, "16-mixed"]
    assert four["learning_rate"] == 2e-3
    assert eight["learning_rate"] == both["learning_rate"] == 4e-3
    assert both["peak_reserved"] < eight["peak_reserved"]
    assert 1.7 < eight["peak_reserved"] / four["peak_reserved"] < 2
    assert four["relative_speed"] == 1
    assert both["relative_speed"] > 2, "this card has tensor cores"
    assert four["utilization"] < 0.35
    assert eight["utilization"] > 0.5
    assert answer["all_fit"]
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_training_by_its_own_tools(tmp_path):
    """Unchanged tools/train.py, under a budget that the step as written does not fit."""
    command = [
        *(sys.executable, str(EXAMPLE / "tools" / "train.py"), str(EXAMPLE / "configs" / "lift_splat_small_scenes.py")),
        *("--work-dir", str(tmp_path), "--cfg-options", "vram_guard.budget=64MiB", "vram_guard.allow=[accumulate]"),
        *("train_cfg.max_iters=2", "train_cfg.val_interval=2", "param_scheduler.1.end=21"),
        *("train_dataloader.dataset.scenes=4", "val_dataloader.dataset.scenes=2"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert "Does not fit as written (" in run.stdout
    assert "this plan is applied" in run.stdout
    assert "micro-batches of" in run.stdout
    assert "bev/IoU" in run.stdout
    assert (tmp_path / "iter_2.pth").exists()
