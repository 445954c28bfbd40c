"""``vram-guard gpus --model``: guide 000's tables, computed for every card."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext

from test_estimate import STEP

from vram_guard import Budget, cli, trace
from vram_guard.budget import catalogue, find_gpu
from vram_guard.capture.object_reference import load_step
from vram_guard.cli import _gpus


def answer(capsys, *arguments):
    assert cli.main(["gpus", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_rule_of_thumb_on_every_card(capsys):
    found = answer(capsys, *shlex.split("--hidden_dim 256 --num_layers 10 --resolutions 64,128,256 --quick"))
    assert (found["method"], len(found["tables"])) == ("rule of thumb", 3)
    for table in found["tables"]:
        side = table["resolution"][0]
        one = side * side * 256 * 10 * 4
        assert [row["name"] for row in table["gpus"]] == [card.name for card in catalogue()]
        for row, card in zip(table["gpus"], catalogue(), strict=True):
            assert row["usable"] == card.memory_bytes * 7 // 10
            assert row["largest_batch"] * one <= row["usable"] < (row["largest_batch"] + 1) * one
            assert row["bytes"] == max(row["largest_batch"], 1) * one


def test_a_step_of_the_users_own_on_every_card(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wide = STEP.replace("build(hidden_dim,", "build(hidden_dim=64,").replace("zeros(size, ", "zeros(size, 16384, ")
    (tmp_path / "steps.py").write_text(wide)
    (table,) = answer(capsys, "--model", "steps.py:build")["tables"]
    rows = {row["name"]: row for row in table["gpus"]}
    assert len(rows) == len(catalogue())
    timeline = trace(load_step("steps.py:build"), compute_capability=(7, 5))
    card = find_gpu("T4")
    assert rows[card.name]["largest_batch"] == timeline.max_batch_size(Budget.of(card), limit=2**16)
    assert rows[card.name]["bytes"] == timeline.replay(rows[card.name]["largest_batch"]).peak_reserved
    memory = sorted(rows.values(), key=lambda row: row["usable"])
    assert memory[0]["largest_batch"] <= memory[-1]["largest_batch"]


SIZED = """
import torch
from vram_guard import TrainingStep


def sized(height, width):
    return TrainingStep(
        model=lambda: torch.nn.Conv2d(3, 8, 3),
        batch=lambda size: torch.zeros(size, 3, height, width),
        loss=lambda model, x: model(x).mean(),
        optimizer=torch.optim.SGD,
    )
"""


def test_one_card_as_the_guide_has_its_tables(tmp_path, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(_gpus, "progress_shown", lambda: nullcontext(said.append))
    (tmp_path / "steps.py").write_text(SIZED)
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split("'RTX 4090' --model steps.py:sized --resolutions 16 16x24")
    assert cli.main(["gpus", *arguments]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[2].split() == ["GPU", "resolution", "largest", "batch", "expected", "usable"]
    assert [line.split()[:3] for line in lines[3:5]] == [["RTX", "4090", "16×16"], ["RTX", "4090", "16×24"]]
    assert lines[5] == ""
    assert lines[6].startswith("Releases: Python 3.")
    assert len(lines) == 7
    assert said == ["tracing for compute capability 8.9"] * 2


MODEL = """
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
"""


def test_a_plain_model_with_the_shape_of_its_input(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    largest = []
    for shape in ("3x64x64", "3x128x128"):
        assert cli.main(["gpus", "4090", "--model", "model.py:net", "--input", shape, "--json"]) == 0
        captured = capsys.readouterr()
        largest.append(json.loads(captured.out)["tables"][0]["gpus"][0]["largest_batch"])
        assert "assumed for model.py:net" in captured.err
    assert 3 < largest[0] / largest[1] < 5, "four times as many pixels"
    fno = ["--model", "fno", "--hidden_dim", "8", "--num_layers", "2", "--height", "16", "--width", "16"]
    for wrong in (
        ["--model", "model.py:net", "--input", "3x8x8", "--resolutions", "8"],
        ["--input", "3x8x8"],
        [*fno, "--input", "3x8x8"],
        [*fno, "--quick", "--input", "3x8x8"],
    ):
        assert cli.main(["gpus", *wrong]) == 2
        assert capsys.readouterr().out == ""


def test_a_card_alone_says_what_it_says_among_all(tmp_path, monkeypatch, capsys):
    """Peaks of convolutions do not rise evenly with the batch: where the search begins must not matter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        MODEL.replace("nn.ReLU(), nn.Adap", "nn.ReLU(), nn.Conv2d(64, 128, 3), nn.Adap").replace(
            "Linear(64", "Linear(128"
        )
    )

    def largest(*cards):
        assert cli.main(["gpus", *cards, "--model", "model.py:net", "--input", "3x224x224", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["tables"][0]["gpus"]
        return {one["name"]: one["largest_batch"] for one in found}

    among_all = largest()
    for card in ("RTX A6000", "RTX 3060 12GB", "H200"):
        assert largest(card).items() <= among_all.items()
