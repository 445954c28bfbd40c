"""Many out-of-memory errors at random operators and ranks: the training ends as if there had been none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

import oom_storm  # noqa: E402

ERRORS = 60


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.torch_since(2, 6))])
def test_a_training_through_many_errors_ends_as_without_them(tmp_path: Path, ranks: int) -> None:
    if ranks > 1 and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    found = oom_storm.storm(tmp_path, ERRORS, ranks, patience=250)
    planned = oom_storm.planned(ERRORS, ranks)
    assert sum(map(len, planned)) == ERRORS
    assert found["errors"] >= ERRORS  # some on both ranks at once
    assert found["steps"] == len(planned)
    assert found["difference"] < 1e-9
