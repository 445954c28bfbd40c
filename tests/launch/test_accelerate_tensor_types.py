"""Scripts that name the GPU by ``torch.cuda.FloatTensor``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "tensor_types.py"


def test_tensor_types_of_the_gpu_are_followed(tmp_path: Path) -> None:
    for how in ("types", "default", "devices"):
        cases.request(tmp_path / how, SCRIPT, how, budget="1GiB", whole_job=False)
    answers = cases.dry_runs(tmp_path)
    peaks = {}
    for how, answer in answers.items():
        assert "error" not in answer, answer
        assert answer["fits"]
        peaks[how] = answer["plan"]["estimate"]["peak_allocated"]
    assert peaks["types"] == peaks["devices"]
