"""Trainings under MMEngine's Runner, with and without the guard: none differs in silence."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")
pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

from fidelity import bridge, mmengine_cases
from fidelity.harness import check, every
from fidelity.mmengine import BRIDGED, CASES, SUITE, of_lightning

assert mmengine_cases


@every(SUITE, CASES)
def test_no_silent_difference(suite, case, mode):
    check(suite, case, mode)


@every(BRIDGED, map(of_lightning, bridge.by_turns(1)))
def test_no_silent_difference_from_lightnings_cases(suite, case, mode):
    check(suite, case, mode)


def test_most_of_lightnings_cases_need_no_trainer():
    assert len(bridge.bridged()) > 280
