"""The example of variants: its data, its networks, and the whole of it run small."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "variants_convlstm"

pytest.importorskip("h5py", reason="the example's data are read with h5py")
pytest.importorskip("iris_sample_data", reason="the example's data come with iris-sample-data")


def load(name):
    spec = importlib.util.spec_from_file_location(f"variants_convlstm_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_temperatures_are_those_of_tropical_seas():
    kelvin, sea = load("data").load_maps()
    assert kelvin.shape == (54, 18, 432)
    assert 0.7 < sea.float().mean() < 0.76
    over_sea = kelvin[:, sea]
    assert 288 < over_sea.min() < over_sea.max() < 306


def test_held_out_months_are_not_in_the_training():
    training, held_out = load("data").training_and_held_out(months=6, columns=48, stride=48)
    assert (len(training), len(held_out)) == (36 * 9, 12 * 9)
    # What is to be predicted is never among the training's inputs: the last training window ends two maps earlier.
    last, first = training.samples[-9][0], held_out.samples[0][0]
    torch.testing.assert_close(last[1:], first[:-1])


@pytest.mark.parametrize("name", ["3dcnn_lstm_micro", "3dcnn_lstm_lite", "convlstm", "3dcnn_lstm"])
def test_an_untrained_network_says_as_last_month(name):
    network = load("models").CONSTRUCTORS[name]()
    change = network(torch.randn(2, 3, 4, 18, 16))
    assert change.shape == (2, 18, 16)
    assert not change.any()


def test_the_example_runs():
    paths = [str(ROOT), str(ROOT / "integrations"), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf8",
    }
    small = ["--epochs", "1", "--columns", "16", "--stride", "144", "--months", "3", "--budget", "48MiB"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *small], capture_output=True, text=True, check=True, env=environment
    )  # fmt: skip
    assert ": the one with most parameters that fits" in run.stdout
    assert "over budget" in run.stdout
    before, after = _errors(run.stdout)
    assert after < before


def _errors(text):
    """The error before and after training, in kelvin."""
    lines = [line for line in text.splitlines() if "K off" in line]
    return [float(line.partition(" K off")[0].split()[-1]) for line in lines]
