"""The example of guide 001: its configurations are the real ones, its table adds up, its script runs as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_video_unlearning"


OWN = ("components", "models", "unlearning")


@pytest.fixture(scope="module")
def components():
    """The script as a module; other examples have modules of the same names, which are given back."""
    others = {name: sys.modules.pop(name) for name in OWN if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        import components

        yield components
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in OWN:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def test_the_real_configuration_has_the_published_sizes(components):
    """5.57 billion parameters, and T5-v1.1-XXL's encoder of 4.76."""
    folder = components.Folder(EXAMPLE / "CogVideoX-5b")
    with torch.device("meta"):
        transformer, text = folder.transformer(torch.float16), folder.text_encoder(torch.float16)
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(5.57e9, rel=0.002)
    assert sum(p.numel() for p in text.parameters()) == pytest.approx(4.76e9, rel=0.002)
    assert not any(p.requires_grad for p in text.parameters())


def test_the_parts_add_up_to_the_peak(components):
    folder = components.Folder(EXAMPLE / "tiny")
    from vram_guard import trace

    estimate = trace(components.step_of(folder, torch.float32, (3, 8, 8))).at(4)
    parts = components.components(folder, torch.float32, estimate)
    assert sum(parts.values()) == pytest.approx(estimate.peak_allocated, rel=0.01)
    assert parts["unlearned transformer"] == parts["original transformer (frozen)"] > 0


def test_a_folder_without_a_configuration_is_refused(components, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"transformer/config\.json"):
        components.Folder(tmp_path)


def test_the_script_trains_under_the_guard(tmp_path):
    """The whole line of the README: a symbolic run, a plan, and the same script with it."""
    command = [sys.executable, "-m", "vram_guard.cli", "launch", "--budget", "48MiB", "--cpu"]
    command += ["train_unlearning.py", "--model_path", "tiny", "--target_concept", "a red car"]
    command += ["--num_frames", "5", "--height", "16", "--width", "16", "--max_train_steps", "2"]
    command += ["--output_dir", str(tmp_path / "unlearned")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert "step 2: loss" in run.stdout
    assert json.loads((tmp_path / "unlearned" / "config.json").read_text())["num_layers"] == 4
    assert list((tmp_path / "unlearned").glob("*.safetensors"))
