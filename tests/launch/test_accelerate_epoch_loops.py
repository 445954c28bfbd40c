"""What a script does after its epochs: its last one, whatever counts them, and evaluations of other kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases

SCRIPT = cases.HERE / "accelerate_scripts" / "epoch_loops.py"
WHOLE = cases.HERE / "accelerate_scripts" / "whole_job.py"
DIFFUSION = cases.HERE / "accelerate_scripts" / "diffusion.py"
LOOPS = (
    *("while_", "while_true", "until_steps", "counted", "listed", "bar", "last_of_its_function", "by_next"),
    "otherwise",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    asked = tmp_path_factory.mktemp("epochs") / "asked"
    for name in LOOPS:
        cases.request(asked / name, SCRIPT, name)
    cases.request(asked / "endless", WHOLE, "plain", "--endless")
    return cases.dry_runs(asked)


@pytest.mark.parametrize("name", LOOPS)
def test_two_epochs_are_followed_and_what_comes_after_the_last(answers: dict[str, Any], name: str) -> None:
    estimate = answers[name]["plan"]["estimate"]
    names = [phase["name"] for phase in estimate["phases"]]
    assert names == ["setup", "training", "saving", "training", "saving", "validation"], estimate["notes"]
    assert estimate["phases"][-1]["peak_allocated"] > 100_000 * (64 + 256 + 512) * 4
    assert not estimate["notes"]


def test_an_evaluation_without_an_end_is_bounded_and_said(answers: dict[str, Any]) -> None:
    estimate = answers["endless"]["plan"]["estimate"]
    names = [phase["name"] for phase in estimate["phases"]]
    assert names == ["setup", *("training", "validation", "saving") * 2]
    said = {note["message"] for note in estimate["notes"]}
    assert said == {"the number of batches of an evaluation is not known: two are counted"}


def test_pictures_that_a_diffusion_pipeline_makes_are_an_evaluation(tmp_path: Path) -> None:
    """Twenty denoising steps of the script's own pipeline, at twice as many samples as pictures, and its decoder."""
    pytest.importorskip("diffusers")
    for count in (4, 16):
        cases.request(tmp_path / f"asked/{count}", DIFFUSION, "--pictures", count, budget="20GiB")
    answers = cases.dry_runs(tmp_path / "asked")
    few, many = answers["4"], answers["16"]
    peaks = []
    for answer in (few, many):
        phases = answer["plan"]["estimate"]["phases"]
        assert [phase["name"] for phase in phases] == ["setup", *("training", "validation") * 2]
        peaks.append({phase["name"]: phase["peak_allocated"] for phase in phases})
    assert peaks[0]["training"] == peaks[1]["training"] > peaks[0]["validation"]
    assert peaks[1]["validation"] - peaks[1]["setup"] == pytest.approx(
        4 * (peaks[0]["validation"] - peaks[0]["setup"]), rel=0.25
    )
    assert many["plan"]["estimate"]["peak"]["phase"] == "validation"
