"""Answers of the commands with --json, held against the schemas in the documentation."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from folders import write_safetensors
from json_answers import SCHEMAS, held_against
from pretended_nvml import GIB, Card
from test_monitor import machine

from vram_guard import cli

__all__ = ["machine"]  # a fixture


CONFIG = "batch_size: 4\nstep: steps.py:build\nheight: 64\nwidth: 64\nhidden_dim: 8\nnum_layers: 2\n"
STEP = """
import torch
from torch import nn
from vram_guard import TrainingStep

def build(width=64, layers=2):
    def model():
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    def batch(size):
        return torch.zeros(size, width)
    return TrainingStep(model=model, batch=batch, loss=lambda model, batch: model(batch).square().mean(),
                        optimizer=torch.optim.AdamW)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "ok.yaml").write_text(CONFIG)
    (tmp_path / "steps.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("estimate", "estimate ok.yaml --gpu 4090 --quick"),
        ("estimate", "estimate ok.yaml --gpu 4090"),
        ("estimate", "estimate --batch 4000 --height 256 --width 256 --hidden-dim 64 --num-layers 8 --gpu-memory 24"),
        ("estimate", "estimate --model steps.py:build --batch 8 --budget 24GiB"),
        ("plan", "plan ok.yaml --gpu 4090"),
        ("plan", "plan steps.py:build --batch 65536 --budget 96MiB"),
        ("plan", "plan steps.py:build --batch 65536 --budget 16MiB --margin 0"),
        pytest.param(
            "plan",
            "plan steps.py:build --batch 64 --gpu 4090 --gpus 2 --layouts ddp,fsdp2",
            marks=pytest.mark.torch_since(2, 6),
        ),
        ("compare", "compare ok.yaml --set batch_size=8 --set lr=0.1 --gpu 4090"),
        ("variants", "variants steps.py:build --batch 64 --budget 1GiB"),
        ("variants", "variants steps.py:build --batch 64 --budget 4MiB --margin 0"),
        ("gpus", "gpus"),
        ("gpus --model", "gpus 4090 --hidden-dim 64 --num-layers 8 --resolutions 64,128 --quick"),
        ("gpus --model", "gpus 4090 --model steps.py:build"),
        ("optimize", "optimize ok.yaml --dry-run --gpu 4090"),
        ("optimize", "optimize ok.yaml --output new.yaml --step steps.py:build --gpu 4090"),
        ("doctor", "doctor"),
    ],
)
def test_answers_are_as_the_schema_says(name, typed, folder, capsys):
    assert cli.main([*typed.split(), "--json"]) in (0, 1)
    assert held_against(name, json.loads(capsys.readouterr().out)) == []


def test_the_answer_about_a_folder(tmp_path, capsys):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "n_positions": 64}))
    write_safetensors(tmp_path / "model.safetensors", {"transformer.wte.weight": ("F32", (100, 32))})
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "T4", "--recommend", "--json"]) == 0
    assert held_against("estimate --model-path", json.loads(capsys.readouterr().out)) == []


def test_the_answer_of_the_monitor(machine, capsys):
    machine(Card(total=24 * GIB, free=GIB, processes=[SimpleNamespace(pid=4242, usedGpuMemory=None)]))
    assert cli.main(["monitor", "0.05", "--json"]) == 0
    assert held_against("monitor", json.loads(capsys.readouterr().out)) == []


def test_every_command_has_a_schema():
    assert {name.partition(" ")[0] for name in SCHEMAS["$defs"]["answers"]} >= {*cli._COMMANDS, "launch", "mmengine"}


def test_the_schema_itself_is_one():
    jsonschema = pytest.importorskip("jsonschema", reason="the independent check of the schema itself")
    jsonschema.Draft202012Validator.check_schema(SCHEMAS)
