"""Launches of a script with other options, which are told and not tried."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from accelerate_cases import ONE, OPTIONS, TRAINER, TRAINING, launch

from vram_guard.codec import from_plain
from vram_guard_accelerate.launch_plan import LaunchPlan

TRAINER_ARGUMENTS = {
    "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1, "samples": 64,
    "per_device_train_batch_size": 16, "torch_compile": True, "torch_compile_backend": "eager",
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("variants")
    asked = folder / "asked"
    cases.request(asked / "by_hand", OPTIONS, "by_hand", "--out", "never.pt", budget="45MiB", allow=("accumulate",))
    cases.request(asked / "asks", OPTIONS, "asks", budget="45MiB", allow=("precision",))
    cases.request(asked / "offered", TRAINING, "offered", "--mixed_precision", "no", "--batch_size", 64,
                  "--samples", 128, budget="115MiB", allow=("precision",))  # fmt: skip
    given = {**TRAINER_ARGUMENTS, "output_dir": str(folder / "trainer")}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    cases.request(asked / "trainer", TRAINER, *words, budget="80MiB", allow=("accumulate",))
    words = [word for name, value in given.items() if "compile" not in name for word in (f"--{name}", str(value))]
    cases.request(asked / "trainer_mixed", TRAINER, *words, budget="90MiB", allow=("precision",))
    settings = folder / "settings.json"
    settings.write_text(json.dumps(given))
    cases.request(asked / "from_a_file", TRAINER, settings, budget="80MiB", allow=("accumulate",))
    return cases.dry_runs(asked)


def test_the_scripts_own_options_are_told_where_nothing_fits(answers: Any) -> None:
    answer = answers["by_hand"]
    assert "error" not in answer, answer
    assert not answer["fits"]
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == []
    assert answer["own_options"] == ["--batch_size", "8", "--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize("name", ["asks", "offered", "trainer_mixed"])
def test_another_precision_of_a_script_that_acts_on_it_is_told(answers: Any, name: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert (answer["fits"], answer["launch_plan"]["precision"]) == (False, "")
    assert any("--mixed_precision bf16" in note for note in answer["notes"])


def test_the_trainers_own_options_are_told_where_it_cannot_be_sliced(answers: Any) -> None:
    answer = answers["trainer"]
    assert "error" not in answer, answer
    assert (answer["fits"], answer["changed"]) == (False, False)
    assert answer["own_options"] == ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]


def test_no_options_are_told_of_a_file_of_settings(answers: Any) -> None:
    answer = answers["from_a_file"]
    assert "error" not in answer, answer
    assert answer["own_options"] == []
    assert not answer["fits"]


def test_the_command_that_was_not_tried_is_printed_whole(tmp_path: Path) -> None:
    words = ("--budget", "45MiB", "--margin", "0", "--allow", "accumulate", "--dry-run", OPTIONS, "by_hand")
    done = launch(*ONE, *words, "--out", tmp_path / "never.pt", cache=tmp_path)
    assert done.returncode == 1, done.stderr
    typed = " ".join(map(str, ("vram-guard launch", *ONE, *words, "--out", tmp_path / "never.pt")))
    assert f"{typed} --batch_size 8 --gradient_accumulation_steps 2" in " ".join(done.stderr.split())
