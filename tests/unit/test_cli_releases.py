"""Commands that predict say for which releases, and where a named file asks for others."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from vram_guard import cli, settings

STEP = """
import torch
from vram_guard import TrainingStep

def build(width=64):
    return TrainingStep(
        model=lambda: torch.nn.Linear(width, width),
        batch=lambda size: torch.zeros(size, width),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )
"""
NAMED = ("--step", "steps.py:build", "--set", "batch_size=8")
COMMANDS = {
    "plan": ["plan", *NAMED, "--gpu", "T4"],
    "compare": ["compare", *NAMED, "--gpu", "T4"],
    "variants": ["variants", "steps.py:build", "--batch", "8", "--gpu", "T4"],
    "estimate": ["estimate", "--model", "steps.py:build", "--batch", "8", "--gpu", "T4"],
    "gpus": ["gpus", "T4", "--model", "steps.py:build"],
}
TORCH = f"torch {version('torch')}"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in settings.KINDS:
        if name != "lang":
            monkeypatch.delenv(f"VRAM_GUARD_{name.upper()}", raising=False)
    (tmp_path / "steps.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    settings.forget()
    yield tmp_path
    settings.forget()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_for_which_releases(name, folder, capsys):
    (folder / "requirements.txt").write_text("torch==2.1\n")  # which nobody names
    assert cli.main([*COMMANDS[name], *(["--verbose"] if name in ("plan", "estimate") else [])]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(TORCH) == 1
    assert "releases" in captured.out.lower()
    assert "asks for" not in captured.err
    assert cli.main([*COMMANDS[name], "--json", "--releases", "requirements.txt"]) == 0
    captured = capsys.readouterr()
    assert f'"torch": "{version("torch")}"' in captured.out
    json.loads(captured.out)
    assert f"{TORCH} is installed, requirements.txt asks for 2.1" in captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_named_file_is_read_before_any_work(name, folder, capsys):
    (folder / "bad.lock").write_text('[[package]]\nname = "torch"\nversion = "2.5')
    assert cli.main([*COMMANDS[name], "--releases", "bad.lock"]) == 2
    captured = capsys.readouterr()
    assert "bad.lock is not valid TOML" in captured.err
    assert TORCH not in captured.out


def test_the_page_says_it_too(folder, capsys):
    assert cli.main([*COMMANDS["plan"], "--html", "page.html"]) == 0
    assert TORCH in Path("page.html").read_text("utf-8")


def test_settings_name_the_file_and_an_option_another(folder, capsys):
    (folder / "train.txt").write_text("torch==2.2\n")
    (folder / "requirements.txt").write_text("torch==2.1\n")
    (folder / "vram_guard.toml").write_text('releases = "train.txt"\n')
    assert cli.main(COMMANDS["plan"]) == 0
    assert "train.txt asks for 2.2" in capsys.readouterr().err
    assert cli.main([*COMMANDS["plan"], "--releases", "requirements.txt"]) == 0
    assert "requirements.txt asks for 2.1" in capsys.readouterr().err
