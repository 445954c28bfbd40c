"""What is read of a runner and its config before anything is built: lengths, loops, loaders, wrappers, layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
import vram_guard_mmengine  # noqa: I001 - first: it knows what MMEngine's own imports warn of
from vram_guard_mmengine import VramGuardHook  # noqa: F401

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.structures import BaseDataElement


class WritesLabels(BaseDataPreprocessor):  # type: ignore[misc]
    """Puts each label back into its sample, as those of mmpretrain do."""

    def forward(self, data: Any, training: bool = False) -> Any:
        inputs = torch.stack(self.cast_data(data["inputs"]))
        labels = torch.cat([sample.gt_label for sample in data["data_samples"]]).to(self.device)
        for sample, label in zip(data["data_samples"], labels.split(1), strict=True):
            sample.gt_label = label
        return {"inputs": inputs, "labels": labels}


class Labelled(BaseModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(data_preprocessor=WritesLabels())
        self.net = torch.nn.Linear(64, 10)

    def forward(self, inputs: Any, labels: Any, mode: str = "tensor") -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.net(inputs), labels)}


def test_a_preprocessor_may_write_into_the_samples_of_its_batch(tmp_path: Path) -> None:
    samples = []
    for number in range(16):
        sample = BaseDataElement()
        sample.gt_label = torch.tensor([number % 10])
        samples.append({"inputs": torch.zeros(64), "data_samples": sample})
    runner = vram_guard_mmengine.GuardRunner(
        Labelled(),
        str(tmp_path),
        train_dataloader={
            "batch_size": 8,
            "dataset": samples,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "pseudo_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        cfg={"vram_guard": {"gpu": "RTX 4090", "mode": "report"}},
    )
    runner.train()
    (log,) = tmp_path.glob("*/*.log")
    assert "predicted_memory: " in log.read_text(encoding="utf-8")
