"""Commands that predict say for which releases, and `plan` where a named file asks for others."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from test_settings import project

from vram_guard import cli

__all__ = ["project"]  # a fixture

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
def folder(project):
    (project / "steps.py").write_text(STEP)
    return project


@pytest.mark.parametrize("name", COMMANDS)
def test_each_says_for_which_releases(name, capsys):
    assert cli.main([*COMMANDS[name], *(["--verbose"] if name in ("plan", "estimate") else [])]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(TORCH) == 1
    assert "releases" in captured.out.lower()
    assert cli.main([*COMMANDS[name], "--json"]) == 0
    captured = capsys.readouterr()
    assert f'"torch": "{version("torch")}"' in captured.out
    json.loads(captured.out)


def test_the_page_says_it_too():
    assert cli.main([*COMMANDS["plan"], "--html", "page.html"]) == 0
    assert TORCH in Path("page.html").read_text("utf-8")


def test_a_file_that_asks_for_others_is_told_apart_from_the_answer(folder, capsys):
    (folder / "requirements.txt").write_text("torch==2.1\n")
    assert cli.main([*COMMANDS["plan"], "--json"]) == 0
    assert "asks for" not in capsys.readouterr().err  # nobody names it
    assert cli.main([*COMMANDS["plan"], "--json", "--releases", "requirements.txt"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert f"{TORCH}, requirements.txt asks for 2.1" in captured.err


def test_a_named_file_is_read_before_any_work(folder, capsys):
    (folder / "bad.lock").write_text('[[package]]\nname = "torch"\nversion = "2.5')
    assert cli.main([*COMMANDS["plan"], "--releases", "bad.lock"]) == 2
    captured = capsys.readouterr()
    assert "bad.lock is not valid TOML" in captured.err
    assert TORCH not in captured.out
