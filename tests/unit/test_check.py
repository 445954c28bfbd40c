"""The check that fails a build: the function, and the fixture in pytest runs of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import vram_guard
from vram_guard import TrainingStep, trace
from vram_guard.check import raise_unless_it_fits
from vram_guard.errors import DoesNotFitError, InvalidInputError, NoDeviceError, VramGuardError

SOURCE = """
import torch
from vram_guard import TrainingStep

def step(width=64):
    return TrainingStep(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)),
        batch=lambda n: torch.zeros(n, 1024, width),
        loss=lambda model, x: model(x).mean(),
        optimizer=torch.optim.AdamW,
    )
"""


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    namespace: dict = {}
    exec(SOURCE, namespace)
    return namespace["step"]()


def test_what_fits_passes_and_is_returned(step):
    estimate = vram_guard.assert_fits(step, 8, "1GiB")
    assert estimate == trace(step).at(8)
    assert vram_guard.assert_fits(step, 8, gpu="RTX 4090").batch_size == 8
    exactly = estimate.peak_reserved
    vram_guard.assert_fits(step, 8, exactly, margin=0)
    with pytest.raises(DoesNotFitError):
        vram_guard.assert_fits(step, 8, exactly - 1, margin=0)


def test_several_processes_leave_room_for_nccl_on_a_card(step):
    alone, spread = step.with_(), step.with_(data_parallel_ranks=2)
    with pytest.raises(DoesNotFitError) as one:
        vram_guard.assert_fits(alone, 100_000, gpu="RTX 4090")
    with pytest.raises(DoesNotFitError) as two:
        vram_guard.assert_fits(spread, 100_000, gpu="RTX 4090")
    assert "NCCL" not in str(one.value)
    assert re.search(r"less \d+\.\d\d MiB for NCCL \(estimate\)", str(two.value))
    with pytest.raises(DoesNotFitError) as stated:  # an amount that PyTorch may reserve stays
        vram_guard.assert_fits(spread, 100_000, "24GiB")
    assert "NCCL" not in str(stated.value)


def test_what_does_not_fit_says_why_and_what_would(step):
    with pytest.raises(DoesNotFitError) as raised:
        vram_guard.assert_fits(step, 4096, "200MiB", margin=0)
    said = str(raised.value)
    assert "batch size 4096 does not fit" in said
    assert "activations" in said
    assert isinstance(raised.value, VramGuardError)


def test_a_lower_bound_is_no_promise(step):
    timeline = replace(trace(step), tier="formula")
    with pytest.raises(DoesNotFitError):
        raise_unless_it_fits(timeline.at(2), timeline, vram_guard.Budget.of("64GiB"))


def test_a_name_in_place_of_a_step(tmp_path):
    (tmp_path / "train.py").write_text(SOURCE)
    name = f"{tmp_path / 'train.py'}:step"
    wide = vram_guard.assert_fits(name, 8, "4GiB", arguments={"width": 128})
    assert wide.peak_allocated > vram_guard.assert_fits(name, 8, "4GiB").peak_allocated


@pytest.mark.parametrize(
    ("arguments", "more"),
    [((0, "1GiB"), {}), ((8, "much"), {}), ((8,), {"gpu": "RTX 4099"}), ((8, "1GiB"), {"margin": 2})],
)
def test_arguments_that_make_no_sense(step, arguments, more):
    with pytest.raises(InvalidInputError):
        vram_guard.assert_fits(step, *arguments, **more)


def test_something_else_than_a_step():
    with pytest.raises(InvalidInputError, match="TrainingStep"):
        vram_guard.assert_fits(torch.nn.Linear(2, 2), 8, "1GiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_nothing_to_hold_it_against(step):
    with pytest.raises(NoDeviceError):
        vram_guard.assert_fits(step, 8)


# --- pytest runs of their own ---

TESTS = """
from train import step

def test_large(assert_fits):
    assert_fits(step(), 4096)

def test_small(assert_fits):
    assert assert_fits(step(), 2).peak_reserved > 0
    assert_fits(step(), 4)

def test_own_gpu(assert_fits):
    assert_fits(step(), 4096, gpu="A100 SXM4 80GB")
"""


@pytest.fixture
def run(tmp_path):
    """A project with a training and tests of it; pytest in a process of its own, the plugin found or named."""
    (tmp_path / "train.py").write_text(SOURCE)
    (tmp_path / "test_memory.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("import sys; sys.path.insert(0, '.')\n")

    def pytest_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        everything = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        # By name and not by entry point: the same whether or not this checkout is installed.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        everything |= {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "vram_guard.pytest_plugin",
            **environment,
        }
        return subprocess.run(command, capture_output=True, text=True, check=False, env=everything, cwd=tmp_path)

    return pytest_run


def test_a_build_fails_where_a_step_does_not_fit(run, tmp_path):
    done = run("--vram-guard-budget", "200MiB", "--vram-guard-report", "memory")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "batch size 4096 does not fit" in done.stdout
    assert "raise_unless_it_fits" not in done.stdout.split("short test summary")[0].split("def test_large")[0]
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == [
        "test_memory.py-test_large.html",
        "test_memory.py-test_own_gpu.html",
        "test_memory.py-test_small-2.html",
        "test_memory.py-test_small.html",
    ]
    page = (tmp_path / "memory" / "test_memory.py-test_large.html").read_text("utf-8")
    assert "Does not fit" in page


def test_the_gpu_of_the_settings(run, tmp_path):
    (tmp_path / "vram_guard.toml").write_text('gpu = "B200"\n')
    assert run("-k", "large").returncode == 0
    assert run("-k", "large", VRAM_GUARD_BUDGET="200MiB").returncode == 1


def test_pytests_start_does_not_wait_for_torch(run, tmp_path):
    (tmp_path / "test_memory.py").write_text("import sys\n\ndef test_light():\n    assert 'torch' not in sys.modules\n")
    assert "1 passed" in run().stdout
    (tmp_path / "test_memory.py").write_text(
        "import sys, torch\n\ndef test_light():\n    assert 'torch' not in sys.modules\n"
    )
    assert "1 failed" in run().stdout, "the check can fail"
