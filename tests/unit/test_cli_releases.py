"""Commands that predict say for which releases."""

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
