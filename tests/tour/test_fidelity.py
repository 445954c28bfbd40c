"""A sample of the table of trainings with and without the guard: of every part of it, one of each kind of row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("mmengine")
pytest.importorskip("accelerate")
from vram_guard_mmengine import VramGuardHook  # noqa: F401, I001 - first: it knows what MMEngine's own imports warn of

from fidelity import suites
from fidelity.harness import MICRO, check


#: Frameworks whose trainings run in copies of the process.
FORKS = {"Accelerate"} if hasattr(os, "fork") else set()


def sample() -> Iterator[tuple[Any, Any, str]]:
    """Rows that have to be equal, that have to be cut and equal, and of which something has to be said."""
    for suite, listed in suites():
        kinds: dict[tuple[bool, bool], Any] = {}
        for case in listed:
            kinds.setdefault((bool(case.says), case.exact), case)
        for case in kinds.values():
            yield suite, case, next((mode for _, mode in case.pairs if mode == MICRO), case.modes[0])


ROWS = list(sample())


@pytest.mark.parametrize(
    ("suite", "case", "mode"),
    ROWS,
    ids=[f"{suite.framework}-{case.name}-{mode}".replace(" ", "_") for suite, case, mode in ROWS],
)
def test_no_silent_difference(suite: Any, case: Any, mode: str) -> None:
    check(suite, case, mode)


def test_the_sample_has_every_kind_of_row() -> None:
    assert {(bool(case.says), case.exact) for _, case, _ in ROWS} >= {(False, False), (False, True), (True, False)}
    assert {suite.framework for suite, _, _ in ROWS} == {"Lightning", "MMEngine"} | FORKS
