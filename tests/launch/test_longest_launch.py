"""The longest batch of a script under ``vram-guard launch``: planned for where the first batches are short."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "lengths.py"


def test_a_script_is_planned_for_its_longest_batch(tmp_path):
    asked = tmp_path / "asked"
    cases.request(asked / "longest", SCRIPT)
    cases.request(asked / "first", SCRIPT, longest="first")
    cases.request(asked / "sliced", SCRIPT, budget="48MiB", allow=("slices",))
    answers = cases.dry_runs(asked)
    longest, first, sliced = (answers[name] for name in ("longest", "first", "sliced"))
    hidden = 4 * 2000 * 256 * 4  # bytes of one activation of the longest batch
    assert longest["plan"]["before"]["peak_allocated"] > first["plan"]["before"]["peak_allocated"] + 3 * hidden
    assert any("4 samples of up to lengths 2000" in note for note in longest["notes"])
    assert not any("longest" in note for note in first["notes"])
    assert sliced["plan"]["fits"]
    assert sliced["launch_plan"]["recipe"]["slices"]["count"] > 1
