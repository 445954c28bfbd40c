"""Trainings with Accelerate, with and without ``guard``: none differs in silence."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import fidelity_accelerate_script as script

from fidelity.accelerate import CASES
from fidelity.harness import fault, judge

PAIRS = [pair for case in CASES for pair in case.pairs]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "VRAM_GUARD_"))}
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VRAM_GUARD_LANG": "en"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, script.__file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: pickle.loads(path.read_bytes()) for path in folder.glob("*-*")}


@pytest.mark.parametrize(("case", "mode"), PAIRS, ids=[f"{case.name}-{mode}".replace(" ", "_") for case, mode in PAIRS])
@pytest.mark.timeout(1600)
def test_no_silent_difference(outcomes, case, mode):
    number = CASES.index(case)
    control = outcomes[f"0-{mode}"].words if number else []
    assert f"{number}-{mode}" in outcomes, "this training's process died"
    wrong = fault(case, mode, judge(case, mode, outcomes[f"{number}-None"], outcomes[f"{number}-{mode}"], control))
    assert not wrong, wrong


@pytest.mark.timeout(1600)
def test_that_slices_draw_other_random_numbers_is_said(outcomes):
    """On the CPU two halves may draw what the whole does; on a GPU they do not."""
    for number, case in enumerate(CASES):
        for _case, mode in case.pairs:
            drawn = any("are drawn for each slice" in word for word in outcomes[f"{number}-{mode}"].words)
            assert drawn == (case.name == "body: noise"), (case.name, mode)
