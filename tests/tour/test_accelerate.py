"""One script under ``vram-guard launch``: shown, refused, made to fit, saved, resumed; in one process and in two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from accelerate_cases import ONE, TRAINING, TWO, difference, launch  # noqa: E402 - what is tested has to be there

TIGHT = ("--budget", "45MiB", "--margin", "0", "--allow", "slices")
LOOP = (TRAINING, "accumulate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


def run(folder: Path, name: str, processes: tuple[str, ...], *more: object, guarded: bool = True) -> Any:
    out = folder / f"{name}.pt"
    own = (*LOOP, "--out", out, *more)
    done = launch(
        *processes, *(TIGHT if guarded else ()), *own, cache=folder, guarded=guarded, ACCELERATE_USE_CPU="true"
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out), done


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return run(folder, "plain", ONE, guarded=False)[0]


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Any:
    return run(folder, "fitted", ONE, "--checkpoints", folder / "saved")


def test_it_fits_in_slices_and_learns_the_same(plain: Any, fitted: Any) -> None:
    weights, done = fitted
    assert "slices of the batch" in " ".join(done.stderr.split())
    assert weights["rates"] == plain["rates"]
    assert 0 < difference(weights, plain) < 2e-6


def test_it_resumes_from_its_checkpoint(folder: Path, fitted: Any) -> None:
    resumed, _ = run(folder, "resumed", ONE, "--resume", folder / "saved" / "step_1", "--steps", 2)
    assert resumed["rates"] == fitted[0]["rates"][1:]


def test_what_does_not_fit_is_not_started(folder: Path) -> None:
    out = folder / "never.pt"
    done = launch(*ONE, "--budget", "1MiB", *LOOP, "--out", out, cache=folder)
    assert done.returncode == 1
    for words in ("DOES NOT FIT", "Closest", "is not started"):
        assert words in done.stderr
    assert not out.exists()


def test_two_processes_hold_one_plan_and_learn_the_same(folder: Path) -> None:
    written, _ = run(folder, "two", TWO, guarded=False)
    sliced, done = run(folder, "two_sliced", TWO)
    assert "fits with" in done.stderr
    assert written["processes"] == sliced["processes"] == 2
    assert written["rates"] == sliced["rates"]
    assert 0 < difference(written, sliced) < 2e-6
