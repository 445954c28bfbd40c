"""With a real GPU: guards in a process that used CUDA, recovery from real errors. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "cases" / "gpu_guard_script.py"
#: Sums in another order, in single precision, over two steps.
ROUNDING = 1e-5


def trained(case: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """What the script prints of a training in a process of its own, and all that it says."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "gpu", case],
        env={**os.environ, "VRAM_GUARD_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained("plain", tmp_path_factory.mktemp("plain"))[0]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["probe"] == pytest.approx(other["probe"], rel=ROUNDING, abs=ROUNDING)


@pytest.mark.gpu
def test_cuda_that_is_initialised_is_no_obstacle_and_the_plan_takes_what_was_predicted(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    guarded, said = trained("planned", tmp_path)
    assert guarded["changed"]
    assert "in its own process" not in said
    assert same_weights(guarded, plain)
    assert guarded["reserved"] < plain["reserved"]
    assert guarded["allocated"] == pytest.approx(guarded["predicted_allocated"], rel=0.03)
    # Which of several free blocks of one size is taken depends on where CUDA put their segments: with the segments of
    # this plan at other addresses its replays hold 538 to 594 MiB. An H100 held 542, 8 of them less for a loss that the
    # guard lets go of sooner.
    assert guarded["reserved"] == pytest.approx(guarded["predicted"], rel=0.12)


@pytest.mark.gpu
def test_after_a_backward_pass_on_the_gpu_the_look_happens_in_the_process_and_says_so(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    guarded, said = trained("second_fit", tmp_path)
    assert guarded["changed"]
    assert "looked at in its own process" in said
    assert same_weights(guarded, plain)


@pytest.mark.gpu
def test_a_real_out_of_memory_error_is_recovered_with_the_same_weights(plain: dict[str, Any], tmp_path: Path) -> None:
    guarded, said = trained("out_of_memory", tmp_path)
    assert "out of memory" in said.lower()
    assert same_weights(guarded, plain)
    assert guarded["reserved"] < plain["reserved"]
