"""Trainings with Accelerate, with and without ``guard``: none differs in silence."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

from fidelity import accelerate_cases, bridge
from fidelity.accelerate import BRIDGED, CASES, SUITE, of_lightning
from fidelity.harness import check, every, fault

assert accelerate_cases


@every(SUITE, CASES)
def test_no_silent_difference(suite, case, mode):
    judged = suite.judge(case, mode)
    wrong = fault(case, mode, judged)
    assert not wrong, wrong
    # On the CPU two halves may draw what the whole does; on a GPU they do not.
    drawn = any("are drawn for each slice" in word for word in judged.words)
    assert drawn == (case.name == "body: noise")


@every(BRIDGED, map(of_lightning, bridge.by_turns(3)))
def test_no_silent_difference_from_lightnings_cases(suite, case, mode):
    check(suite, case, mode)
