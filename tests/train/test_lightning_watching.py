"""Measured memory in a Trainer, on a device whose memory the test gives in numbers."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases
import oom_cases
from device_numbers import Numbers
from guard_arguments import in_advanced

from vram_guard.guard import guard as core
from vram_guard.watch.corrections import Corrections, subject
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore")
PL = cases.NAMESPACE


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Numbers:
    monkeypatch.setenv("VRAM_GUARD_CACHE", str(tmp_path / "cache"))
    numbers = Numbers()
    monkeypatch.setattr(core, "reader_for", lambda device: numbers)
    return numbers


def train(
    root: Path,
    memory: Numbers,
    share: float,
    module: Any = None,
    callbacks: Any = (),
    enable_progress_bar: bool = False,
    **settings: Any,
) -> tuple[VramGuard, list[Any]]:
    """A training that takes ``share`` times what is predicted; the guard, and what loggers were given."""
    guard = VramGuard(**in_advanced({"budget": "64GiB", "margin": 0, **settings}))
    callback, logger = importlib.import_module(PL).Callback, importlib.import_module(f"{PL}.loggers").Logger
    written: list[Any] = []

    class Takes(callback):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            assert guard.plan is not None
            estimate = guard.plan.estimate
            memory.take(round(share * estimate.peak_allocated), round(share * estimate.peak_reserved))

    class Writes(logger):  # type: ignore[misc, valid-type]
        name, version = "writes", 0

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            written.append(metrics)

    bar = {"enable_progress_bar": enable_progress_bar}
    trainer = cases.make_trainer(PL, root, [guard, Takes(), *callbacks], max_epochs=1, logger=Writes(), **bar)
    torch.manual_seed(0)
    trainer.fit(module or cases.make_module(PL), cases.loader(40))
    return guard, [line for line in written if any("measured" in name for name in line)]


def remembered(root: Path) -> list[str]:
    """What is kept for later predictions; pages for people are not."""
    folder = root / "cache"
    return sorted(found.name for found in folder.iterdir() if found.name != "reports") if folder.exists() else []


def test_said_once_and_used_next_time(tmp_path: Path, memory: Numbers, capsys: Any) -> None:
    guard, logged = train(tmp_path, memory, 1.25)
    assert guard.plan is not None
    assert guard.plan.correction == 1.0
    out = capsys.readouterr().out
    assert out.count("after 3 optimizer steps, peak allocated") == 1
    assert "(+25.0%)" in out
    assert len(logged) == 1
    assert logged[0]["vram_guard/measured_peak_allocated_bytes"] == round(1.25 * guard.plan.estimate.peak_allocated)

    memory.__init__()  # type: ignore[misc] - another process
    again, _ = train(tmp_path, memory, 0.5)
    assert again.plan is not None
    assert again.plan.correction == pytest.approx(1.25, rel=1e-3)
    assert again.plan.peak == int(again.plan.estimate.peak_reserved * again.plan.correction)
    assert "measured in earlier runs" in capsys.readouterr().out

    memory.__init__()  # type: ignore[misc]
    other, _ = train(tmp_path, memory, 1.0, module=cases.make_module(PL, hidden=17))
    assert other.plan is not None
    assert other.plan.correction == 1.0, "another model"


def test_memory_that_others_take_after_the_plan_is_said_before_the_first_step(tmp_path: Path, memory: Numbers) -> None:
    class Optimizes(type(cases.make_module(PL))):  # type: ignore[misc]
        """Another process takes nearly everything while optimizers are made."""

        def configure_optimizers(self) -> Any:
            memory.others = memory.total - 2**20
            return super().configure_optimizers()

    memory.others = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        guard, _ = train(tmp_path, memory, 1.0, module=Optimizes())
    assert guard.plan is not None
    assert guard.plan.fits
    said = [str(one.message) for one in told if "no longer free on the device" in str(one.message)]
    assert len(said) == 1
    assert "other processes have taken memory" in said[0]
    memory.__init__()  # type: ignore[misc] - nobody else
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(tmp_path, memory, 1.0)
    assert not [one for one in told if "no longer free" in str(one.message)]


def test_switched_off(tmp_path: Path, memory: Numbers, capsys: Any) -> None:
    train(tmp_path, memory, 1.25, remember=False)
    assert "after 3 optimizer steps" in capsys.readouterr().out
    assert remembered(tmp_path) == []
    train(tmp_path, Numbers(), 1.25)
    guard, _ = train(tmp_path, memory, 1.0, remember=False)
    assert guard.plan is not None
    assert guard.plan.correction == 1.0


def test_a_peak_at_an_out_of_memory_error_is_remembered(tmp_path: Path, memory: Numbers, capsys: Any) -> None:
    base = type(cases.make_module(PL))

    class Breaks(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.loaded and len(batch[0]) > 4:
                raise oom_cases.no_memory()
            return super().training_step(batch, batch_idx)

    guard, logged = train(tmp_path, memory, 1.5, module=Breaks())
    assert guard.plan is not None
    assert logged == [], "what was measured later is not the predicted plan's"
    about = subject(Breaks(), "32-true", memory.name())
    assert Corrections().factor(about) == pytest.approx(1.5, rel=1e-3)
