"""The releases that a prediction is for, and that every command says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from test_settings import project

from vram_guard import cli

__all__ = ["project"]  # a fixture


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_those_that_are_imported_and_no_others(tmp_path):
    write(tmp_path, "timm/__init__.py", "__version__ = '1.0.9'\n")  # on the path, without metadata
    write(tmp_path, "diffusers/__init__.py", "raise SystemError\n")
    write(tmp_path, "transformers/__init__.py", "")
    write(tmp_path, "transformers/modeling_utils.py", "")
    write(tmp_path, "transformers-4.45.2.dist-info/METADATA", "Name: transformers\nVersion: 4.45.2\n")
    code = """
import torch, timm, yaml, transformers
from vram_guard.releases import Releases
print(Releases.here())
import transformers.modeling_utils
print(Releases.here())
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    looked_at, used = (line.split(", ") for line in run.stdout.strip().splitlines())
    assert used[0] == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert used[1].startswith(f"torch {version('torch')}")
    assert used[2:] == ["transformers 4.45.2", "timm 1.0.9"]
    assert looked_at == [used[0], used[1], used[3]]


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
