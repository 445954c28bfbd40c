"""A real LightningCLI whose config holds the guard: the example's, with other values on its command line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="LightningCLI parses with jsonargparse")
from lightning.pytorch.cli import LightningCLI

from vram_guard.cli import main
from vram_guard_lightning import VramGuard

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_cli"


@pytest.fixture(autouse=True)
def in_the_example(monkeypatch):
    """The example's folder as a project: ``train`` is its module."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own use of it
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    importlib.import_module("train")
    yield
    sys.modules.pop("train", None)


def trained(*arguments: str) -> VramGuard:
    cli = LightningCLI(
        save_config_callback=None,
        args=["fit", "--config", "config.yaml", "--trainer.enable_progress_bar=false", *arguments],
    )
    guard = next(one for one in cli.trainer.callbacks if isinstance(one, VramGuard))
    assert cli.trainer.global_step == 4
    return guard


def test_the_examples_config_trains_under_its_plan(capsys):
    guard = trained()
    assert guard.settings.techniques == {"accumulate", "checkpoint"}
    assert guard.plan.fits
    assert guard.plan.micro_batch_size < guard.plan.batch_size == 64
    assert "FITS" in capsys.readouterr().out


def test_one_setting_of_the_guard_on_the_command_line():
    guard = trained("--trainer.callbacks.allow=accumulate", "--trainer.callbacks.budget=24MiB")
    assert guard.settings.techniques == {"accumulate"}
    assert guard.plan.micro_batch_size < 64


def test_settings_that_the_config_leaves_out_come_from_the_environment(monkeypatch):
    """LightningCLI gives every argument, None for those that are not written."""
    monkeypatch.setenv("VRAM_GUARD_MARGIN", "0.4")
    monkeypatch.setenv("VRAM_GUARD_BUDGET", "1GiB")
    guard = trained("--trainer.callbacks.mode=report")
    assert guard.settings.margin == 0.4
    assert guard.settings.budget == "32MiB"  # given: it wins


def test_a_config_that_optimize_wrote(tmp_path, capsys):
    """Entries that are there are changed, and none is added: LightningCLI takes what it took."""
    written, output = tmp_path / "config.yaml", tmp_path / "optimized.yaml"
    config = Path("config.yaml").read_text(encoding="utf-8")
    written.write_text(config.replace("trainer:\n", "trainer:\n  precision: 32-true\n", 1), encoding="utf-8")
    assert main(["optimize", "--config", str(written), "--gpu", "RTX 4090", "--output", str(output)]) == 0
    assert "trainer.precision" in capsys.readouterr().out
    trainer = LightningCLI(run=False, save_config_callback=None, args=["--config", str(output)]).trainer
    assert (trainer.precision, trainer.gradient_clip_val) == ("bf16-mixed", None)
