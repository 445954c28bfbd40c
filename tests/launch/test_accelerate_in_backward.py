"""Optimizers that a script's own hooks step in the backward pass, under ``vram-guard launch``."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

from vram_guard.plan.descriptions import Reason, Why

SCRIPT = cases.HERE / "accelerate_scripts" / "steps_in_backward.py"
#: Bytes of one weight of the script's eight.
WEIGHT, LAYERS = 4 * 512**2, 8


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = tmp_path_factory.mktemp("asked")
    for loop in ("plain", "trainer"):
        for name in (loop, f"{loop}_usual"):
            cases.request(asked / name, SCRIPT, name, asked / f"{name}_out", budget="1GiB", whole_job=False)
    for name in ("plain_alone", "plain_earlier"):
        cases.request(asked / name, SCRIPT, name, asked / f"{name}_out", budget="1GiB")
    return cases.dry_runs(asked)


@pytest.mark.parametrize("loop", ["plain", "plain_alone", "plain_earlier", "trainer"])
def test_hooks_that_step_in_the_backward_pass_are_followed(answers: Any, loop: str) -> None:
    hooked, usual = answers[loop], answers[f"{loop.partition('_')[0]}_usual"]
    assert "error" not in hooked, hooked
    found, after = hooked["plan"]["estimate"], usual["plan"]["estimate"]
    assert not hooked["plan"]["changed"]
    assert (str(Reason(Why.JOB_LEFT_OUT)) in hooked["plan"]["reasons"]) == (
        "_" not in loop
    )  # where it was not asked for
    # Two gradients are there at once, at the most; all of them, and the states, where the optimizer steps afterwards.
    assert after["peak_allocated"] - found["peak_allocated"] >= (LAYERS - 2) * WEIGHT
    assert found["peak_allocated"] >= 3 * LAYERS * WEIGHT  # weights and both states
    assert found["breakdown"]["gradients"] >= WEIGHT
    assert not found.get("leaks")
