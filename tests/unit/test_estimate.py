"""``vram-guard estimate`` with numbers and configs: guide 000, as people and programs use it, on real files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from each import each

from vram_guard import cli

ROOT = Path(__file__).parents[2]
#: A few of these numbers in the guide's own order and spelling.
GUIDE = shlex.split("--height 128 --width 128 --hidden_dim 256 --num_layers 10 --gpu_memory 24")
FNO = """\
# DiffSR: a Fourier neural operator on sea surface temperatures
model:
  name: fno
  hidden_dim: 16
  num_layers: 4
data:
  resolution: [32, 32]
train:
  batch_size: 8
  accumulation_steps: 2
valid:
  batch_size: 1
gpu_memory: 24
"""
STEP = """\
import torch
from vram_guard import TrainingStep


def build(hidden_dim, depth=2):
    layers = [torch.nn.Linear(hidden_dim, hidden_dim) for _ in range(depth)]
    return TrainingStep(
        model=lambda: torch.nn.Sequential(*layers),
        batch=lambda size: torch.zeros(size, hidden_dim),
        loss=lambda model, x: model(x).sum(),
        optimizer=torch.optim.SGD,
    )


def fails():
    def loss(model, x):
        raise RuntimeError("the user's own loss")
    return build(8).with_(loss=loss)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fno_ocean.yaml").write_text(FNO)
    (tmp_path / "steps.py").write_text(STEP)
    # Another test's module of this name, from another folder, is not meant; nor is this one afterwards.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    yield tmp_path
    sys.modules.pop("steps", None)


def answer(capsys, *arguments):
    """(exit code, the JSON answer)."""
    code = cli.main(["estimate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_guides_safe_and_its_unsafe_example(capsys):
    code, safe = answer(capsys, "--batch", "8", *GUIDE)
    assert (code, safe["fits"], safe["schema"], safe["decided_by"]) == (0, True, 1, "rule of thumb")
    assert safe["rule_of_thumb"]["total_bytes"] == 1_342_177_280
    assert safe["rule_of_thumb"]["remaining"] == 16_800_000_000 - 1_342_177_280
    arguments = shlex.split("--batch 16 --height 256 --width 256 --hidden-dim 512 --num-layers 10 --gpu-memory 24")
    code, over = answer(capsys, *arguments)
    assert (code, over["fits"]) == (1, False)
    rule = over["rule_of_thumb"]
    assert rule["remaining"] == 16_800_000_000 - 21_474_836_480
    assert rule["fixes"] == {
        "largest_batch": 12,
        "largest_resolution": [226, 226],
        "accumulation": {"micro_batch": 8, "accumulate": 2},
        "amp": {"total_bytes": 10_737_418_240, "fits": True, "largest_batch": 25},
    }


def test_the_guides_tuning_goes_down_until_it_is_safe(capsys):
    codes = [
        cli.main(["estimate", *shlex.split(f"--batch {n} --height 256 --width 256 --hidden_dim 512"), *GUIDE[6:]])
        for n in (16, 12, 8, 4)
    ]
    assert codes == [1, 0, 0, 0]
    out = capsys.readouterr().out
    assert "a smaller batch: 16 → 12" in out


def test_a_cautious_threshold_and_half_precision(capsys):
    _, usual = answer(capsys, "--batch", "8", *GUIDE)
    _, cautious = answer(capsys, "--batch", "8", *GUIDE, "--threshold", "0.6", "--bytes_per_element", "2")
    assert cautious["rule_of_thumb"]["allowed"] == 14_400_000_000
    assert cautious["rule_of_thumb"]["total_bytes"] * 2 == usual["rule_of_thumb"]["total_bytes"]
    assert cautious["rule_of_thumb"]["fixes"]["amp"] is None


#: Models that configs name, and what else they say of the network; none of it is a network that can be built.
NAMED = {
    "fno": "name: fno\n  hidden_dim: 16\n  num_layers: 4",
    "unet": "name: unet\n  hidden_dim: 16\n  num_layers: 4",
    "ddpm": "type: ddpm\n  base_channels: 16\n  depth: 4",
    "transformer": "name: transformer\n  d_model: 16\n  n_layers: 4",
    # A library has a model of this name, of other sizes.
    "bert": "name: bert\n  hidden_size: 16\n  num_layers: 4",
    "gpt2": "model_type: gpt2\n  hidden_dim: 16\n  num_layers: 4\n  n_head: 4",
}


@each("name", NAMED)
def test_a_network_that_cannot_be_built_from_the_config_is_answered_by_the_rule_alone(folder, capsys, name):
    text = FNO.replace("name: fno\n  hidden_dim: 16\n  num_layers: 4", NAMED[name])
    (folder / "named.yaml").write_text(text)
    code, only = answer(capsys, "--config", "named.yaml")
    assert (code, only["decided_by"], only["symbolic"]) == (0, "rule of thumb", None)
    assert only["found_in_config"]["batch"] == "train.batch_size"
    assert name in only["notes"][0]
    assert cli.main(["plan", "--config", "named.yaml", "--gpu", "T4"]) == 2
    assert name in capsys.readouterr().err


def test_a_config_with_a_step_has_the_symbolic_answer(folder, capsys):
    (folder / "own.yaml").write_text(f"step: steps.py:build\n{FNO}")
    code, both = answer(capsys, "--config", "own.yaml")
    assert (code, both["decided_by"], both["rule_of_thumb"]) == (0, "symbolic", None)
    symbolic = both["symbolic"]
    assert symbolic["estimate"]["tier"] == "symbolic"
    assert symbolic["largest_batch"] > 8
    assert symbolic["budget"]["available"] < 24 * 10**9  # the CUDA context has its part of a whole GPU
    usable = []
    for margin in ("0", "0.5"):
        _, both = answer(capsys, "--config", "own.yaml", "--margin", margin)
        usable.append(both["symbolic"]["budget"]["usable"])
    assert usable[1] == usable[0] // 2
    code, both = answer(capsys, "--config", "own.yaml", "--budget", "3MiB")
    assert (code, both["fits"]) == (1, False)


def test_quick_answers_without_building_anything(folder, capsys):
    code, quick = answer(capsys, "--config", "fno_ocean.yaml", "--quick")
    assert (code, quick["symbolic"], quick["decided_by"]) == (0, None, "rule of thumb")


def test_a_step_of_the_users_own_is_given_the_configs_entries(folder, capsys):
    code, both = answer(capsys, "--config", "fno_ocean.yaml", "--model", "steps:build")
    assert code == 0
    # Two layers of 16 x 16 and their biases, in blocks of 512 bytes.
    assert both["symbolic"]["estimate"]["breakdown"]["parameters"] == 2 * (1024 + 512)


def test_a_model_that_knows_its_sizes_needs_only_a_batch(folder, capsys):
    (folder / "own.yaml").write_text("step: steps.py:build\nhidden_dim: 32\nbatch_size: 4\ngpu: RTX 4090\n")
    code, only = answer(capsys, "--config", "own.yaml")
    assert (code, only["rule_of_thumb"], only["decided_by"]) == (0, None, "symbolic")
    assert cli.main(["estimate", "--config", "own.yaml"]) == 0
    assert "largest batch" in capsys.readouterr().out


def test_a_transformers_config(folder, capsys):
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 100,
        "n_positions": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    code, only = answer(capsys, "--model", "config.json", "--batch", "2", "--seq-length", "16", "--gpu", "T4")
    assert (code, only["symbolic"]["estimate"]["tier"]) == (0, "symbolic")
    assert only["symbolic"]["estimate"]["breakdown"]["optimizer_states"] > 0


def test_what_stands_in_the_way_of_a_symbolic_answer_is_said(folder, capsys):
    assert cli.main(["estimate", "--batch", "8", *GUIDE, "--model", "diffsr"]) == 0  # the rule remains
    captured = capsys.readouterr()
    assert "diffsr is unknown" in captured.err
    assert "diffsr" not in captured.out.replace("model: diffsr", "")
    assert cli.main(["estimate", "--batch", "8", "--gpu_memory", "24", "--model", "steps:fails"]) == 2
    captured = capsys.readouterr()
    assert "RuntimeError: the user's own loss" in captured.err
    assert "fits" not in captured.out
    assert cli.main(["estimate", "--batch", "8", "--gpu_memory", "24", "--margin", "5", "--model", "steps:fails"]) == 2
    assert "margin must be a fraction" in capsys.readouterr().err


def test_in_chinese_as_the_guide_has_it(capsys):
    arguments = ["estimate", "--lang", "zh", *GUIDE]
    assert cli.main([*arguments, "--batch", "8"]) == 0
    safe = capsys.readouterr().out
    assert "✅ 安全" in safe  # what the guide's own agent looks for
    assert "总激活显存：1.342 GB" in safe
    assert cli.main([*arguments, "--batch", "800"]) == 1
    over = capsys.readouterr().out
    assert "✅ 安全" not in over
    assert "降低批大小：800 → 100" in over


def test_the_language_of_the_environment():
    environment = {"LANG": "zh_CN.UTF-8", "PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "vram_guard.cli", "estimate", "--batch", "8", *GUIDE]
    run = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (run.returncode, run.stderr) == (0, b"")
    assert "✅ 安全" in run.stdout.decode()


def test_a_terminal_that_knows_only_ascii_gets_its_answer():
    environment = {"LANG": "zh_CN", "PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "vram_guard.cli", "estimate", "--batch", "8", *GUIDE]
    run = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert b"all layers: 1.342 GB" in run.stdout


def test_the_calculator_answers_without_torch(folder):
    """Numbers, and a config beside them; what takes its time is to import such libraries."""
    code = textwrap.dedent("""
        import sys
        from vram_guard.cli import main
        code = main(sys.argv[1:])
        heavy = {"torch", "numpy", "rich", "transformers", "diffusers"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else code)
    """)
    roots = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
    for arguments in (["--batch", "8", *GUIDE], ["--config", "fno_ocean.yaml", "--quick"]):
        command = [sys.executable, "-c", code, "estimate", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (run.returncode, run.stderr) == (0, "")
