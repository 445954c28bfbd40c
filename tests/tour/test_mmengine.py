"""One training of an MMEngine config: reported, refused, made to fit, saved, resumed, out of memory on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

import mmengine_cases as cases
import oom_cases
import torch
from mmengine.registry import MODELS

from vram_guard.errors import DoesNotFitError


@MODELS.register_module(force=True)
class Overflowing(cases.SmallClassifier):
    """There is memory for half a batch, once it is armed."""

    armed = False

    def forward(self, inputs: torch.Tensor, data_samples: list[Any], mode: str = "tensor") -> Any:
        if mode == "loss" and len(inputs) > 4 and self.armed:
            raise oom_cases.no_memory()
        return super().forward(inputs, data_samples, mode)


@cases.HOOKS.register_module(force=True)
class Arming(cases.Hook):
    """From the fourth batch on."""

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        runner.model.armed = runner.iter >= 3


class Training:
    """Configs on disk, with a file of the guard's among those that they are based on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = cases.write_configs(folder / "configs", cases.MMPRETRAIN)
        cases.write_base(self.root)
        leaf = self.root / "small.py"
        (self.root / "guarded.py").write_text(
            leaf.read_text().replace("_base_ = [", "_base_ = ['./_base_/vram_guard.py', ")
        )
        self.plain = cases.train(cases.load(self.root, "small.py", folder / "plain"))

    def run(self, name: str, *, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
        options = {f"vram_guard.{key}": value for key, value in {"margin": 0, **settings}.items()}
        return cases.train(cases.load(self.root, "guarded.py", self.folder / name, **options, **(changes or {})))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("mmengine"))


@pytest.fixture(scope="module")
def reported(training: Training) -> Any:
    return training.run("report", budget="8GiB", mode="report")


@pytest.fixture(scope="module")
def tight(reported: Any) -> int:
    """A budget that the step as written just does not fit."""
    return cases.guard(reported).plan.before.peak_reserved - 1  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def fitted(training: Training, tight: int) -> Any:
    return training.run("fit", budget=tight, allow=["accumulate"])


def test_a_report_says_what_it_takes_and_changes_nothing(training: Training, reported: Any) -> None:
    assert cases.guard(reported).plan.fits
    cases.same(reported, training.plain, tolerance=0)


def test_strict_refuses_before_anything_is_trained(training: Training, tight: int) -> None:
    with pytest.raises(DoesNotFitError):
        training.run("strict", budget=tight, mode="strict")
    assert not list((training.folder / "strict").glob("*.pth"))


def test_it_fits_in_micro_batches_and_learns_the_same(training: Training, fitted: Any) -> None:
    plan = cases.guard(fitted).plan
    assert type(fitted).__name__ == "GuardRunner", "as the file among its bases says"
    assert plan.fits
    assert plan.splits > 1
    cases.same(fitted, training.plain, tolerance=1e-6)


def test_it_resumes_from_its_checkpoint(training: Training, fitted: Any, tight: int) -> None:
    saved = str(training.folder / "fit" / "epoch_2.pth")
    resumed = training.run("fit", budget=tight, allow=["accumulate"], changes={"resume": True, "load_from": saved})
    assert cases.diary(resumed).rates == cases.diary(fitted).rates[6:]
    assert torch.allclose(cases.weights(resumed), cases.weights(fitted), rtol=0, atol=1e-6)


def test_the_batch_that_ran_out_of_memory_runs_again_in_smaller_ones(training: Training) -> None:
    changes = {"model.type": "Overflowing", "custom_hooks": [{"type": "Arming"}]}
    said = {"recover": True, "allow": ["accumulate"], "loss_weight": "mean"}
    runner = training.run("overflow", budget="8GiB", changes=changes, **said)
    assert runner.model.armed
    cases.same(runner, training.plain, tolerance=1e-6)
