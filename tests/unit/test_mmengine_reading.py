"""What is read of a runner and its config before anything is built: lengths, loops, loaders, wrappers, layouts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each import each

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook, _optim  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import torch
import vram_guard_mmengine
from mmengine.config import ConfigDict
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.optim import OptimWrapper
from mmengine.structures import BaseDataElement
from torch import nn

from vram_guard.errors import InvalidInputError
from vram_guard_mmengine._refusals import refusals
from vram_guard_mmengine.commands import write_base


# --- batches of an evaluation -----------------------------------------------------------------------------------


# --- loops ------------------------------------------------------------------------------------------------------


# --- wrappers, optimizers, checkpoints ----------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_base_file_is_everyones_to_read(tmp_path: Path) -> None:
    assert write_base(tmp_path).stat().st_mode & 0o777 == 0o644


def test_a_base_file_of_somebody_else_is_replaced_by_force_alone(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    written = path.read_text()
    assert write_base(tmp_path) == path, "the same contents are no obstacle"
    path.write_text("budget = 1")
    with pytest.raises(InvalidInputError, match="--force"):
        write_base(tmp_path)
    assert path.read_text() == "budget = 1"
    assert write_base(tmp_path, force=True).read_text() == written
    with pytest.raises(InvalidInputError, match="is not a folder"):
        write_base(tmp_path / "nowhere")


class OwnStep(OptimWrapper):  # type: ignore[misc]
    """A wrapper of the user's."""

    def backward(self, loss: Any, **kwargs: Any) -> None: ...


PLAIN = {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 1.0}}
MIXED = {**PLAIN, "type": "AmpOptimWrapper"}
OWN = {**PLAIN, "type": OwnStep}


@each(
    ("technique", "wrapper", "config", "pin", "refused"),
    [
        ("precision", PLAIN, {}, None, False),
        ("precision", "built", {}, None, True),
        ("precision", MIXED, {}, None, True),  # it stays so
        ("precision", MIXED, {}, {"precision": "bf16-mixed"}, False),
        ("precision", OWN, {}, None, True),
        ("optimizer_in_backward", PLAIN, {}, None, False),
        ("optimizer_in_backward", MIXED, {}, None, True),
        ("optimizer_in_backward", OWN, {}, None, True),
        ("accumulate", PLAIN, {}, None, False),
        ("accumulate", OWN, {}, None, True),
        ("checkpoint", PLAIN, {}, None, False),
        ("checkpoint", PLAIN, {"activation_checkpointing": ["layers"]}, None, True),
        ("8bit", PLAIN, {}, None, False),
        ("8bit", PLAIN, {"resume": True}, None, True),
        ("offload_frozen", PLAIN, {}, None, True),
        ("half", PLAIN, {}, None, True),
        ("shard", PLAIN, {}, None, True),  # there is one process
        ("grow", PLAIN, {}, None, True),
    ],
)
def test_what_a_runner_does_not_go_with(technique: str, wrapper: Any, config: Any, pin: Any, refused: bool) -> None:
    if wrapper == "built":
        wrapper = OptimWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    runner = SimpleNamespace(
        model=nn.Linear(1, 1),
        cfg=ConfigDict({name: value for name, value in config.items() if name != "resume"}),
        world_size=1,
        optim_wrapper=wrapper,
        _resume=config.get("resume", False),
    )
    settings: Any = VramGuardHook(budget="1GiB", pin=pin).settings
    found = {one.technique for one in refusals(runner, _optim.read(wrapper), settings, growable="small") if one.reason}
    assert (technique in found) is refused


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
