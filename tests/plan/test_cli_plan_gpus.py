"""``vram-guard plan --gpus``: several GPUs from the command line, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

STEP = """
import torch
from torch import nn
from vram_guard import TrainingStep


def build():
    def model():
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))

    return TrainingStep(model, lambda size: torch.ones(size, 64), lambda m, x: m(x).sum(), torch.optim.AdamW)


def untouched():
    raise SystemExit("the step was made")
"""
COMMON = ("--step", "steps.py:build", "--gpu", "A100 SXM4 80GB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    (made / "steps.py").write_text(STEP)
    return made


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vram_guard.cli", "--lang", "en", "plan", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.torch_since(2, 6)
def test_a_report_for_people(folder: Path) -> None:
    wishes = ("--gpus", "16", "--node-gpus", "8", "--link", "nvlink,ib200", "--layouts", "fsdp2")
    made = run(folder, *COMMON, "--set", "batch_size=4", *wishes, "--verbose")

    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("FITS")
    for words in (
        "Over several GPUs",
        "16 on 2 nodes",
        "nvlink3 within a node, ib200 between nodes",
        "64 over all GPUs, as written",
        "FSDP2 over 16 GPUs, gathered weights kept",
    ):
        assert words in made.stdout, made.stdout


@pytest.mark.torch_since(2, 6)
def test_an_answer_for_programs_and_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vram_guard import cli

    monkeypatch.chdir(folder)
    wishes = ["--set", "batch_size=64", "--gpus", "auto", "--json"]
    assert cli.main(["plan", *COMMON, *wishes]) == 0
    found = json.loads(capsys.readouterr().out)["report"]["spread"]
    assert (found["gpus"], found["fewest"], found["layout"], found["samples_per_step"]) == (1, True, None, 64)

    budget = ["--step", "steps.py:build", "--budget", "1MiB", "--allow", "", "--set", "batch_size=4"]
    assert cli.main(["plan", *budget, "--gpus", "2", "--layouts", "fsdp2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["report"]["fits"] is False
