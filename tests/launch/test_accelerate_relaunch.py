"""Launches of a script in another way: which are tried and taken, and which are only told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from accelerate_cases import ONE, OPTIONS, TRAINER, launch  # noqa: E402

from vram_guard.codec import from_json, from_plain, to_json  # noqa: E402
from vram_guard.errors import UnsupportedStepError  # noqa: E402
from vram_guard.language import Message  # noqa: E402
from vram_guard.plan.descriptions import Reason, Why  # noqa: E402
from vram_guard.releases.installed import Releases  # noqa: E402
from vram_guard.timeline import Estimate, Note, Phase  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile  # noqa: E402
from vram_guard_accelerate.dry_run.results import DryRunFailure  # noqa: E402
from vram_guard_accelerate.launch_plan import LaunchPlan  # noqa: E402
from vram_guard_accelerate.planning.prediction import better_of  # noqa: E402
from vram_guard_accelerate.planning.relaunch import Baseline, Relaunch, disagreement  # noqa: E402
from vram_guard_accelerate.planning.requests import DryRunAnswer  # noqa: E402

TRAINER_ARGUMENTS = {
    "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1, "samples": 64,
    "per_device_train_batch_size": 16, "torch_compile": True, "torch_compile_backend": "eager",
}  # fmt: skip


# --- the dry runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("variants")
    asked = folder / "asked"
    cases.request(asked / "by_hand", OPTIONS, "by_hand", "--out", "never.pt", budget="45MiB", allow=("accumulate",))
    cases.request(asked / "asks", OPTIONS, "asks", budget="60MiB", allow=("precision",))
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
    assert "tried" not in answer
    assert not answer["fits"]
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == []
    assert answer["own_options"] == ["--batch_size", "8", "--gradient_accumulation_steps", "2"]


def test_a_script_that_acts_on_its_precision_is_seen_to_do_so(answers: Any) -> None:
    answer = answers["asks"]
    assert "error" not in answer, answer
    assert answer["launch_plan"]["precision"] == "bf16"
    before, after = (answer["plan"][which]["breakdown"]["parameters"] for which in ("before", "estimate"))
    # Its frozen encoder has a million weights, which the script itself halves.
    assert before - after == pytest.approx(2_000_000, abs=512)
    assert not any("mixed precision is not possible" in note for note in answer["notes"])


def test_the_trainers_own_options_are_told_where_it_cannot_be_sliced(answers: Any) -> None:
    answer = answers["trainer"]
    assert "error" not in answer, answer
    assert (answer["fits"], answer["changed"]) == (False, False)
    assert answer["own_options"] == ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]


def test_transformers_trainer_takes_the_precision_of_its_environment(answers: Any) -> None:
    answer = answers["trainer_mixed"]
    assert "error" not in answer, answer
    assert answer["tried"] == ["--mixed_precision bf16"]
    assert (answer["launch_plan"]["precision"], answer["launch_plan"]["precision_option"]) == ("bf16", "")
    assert answer["fits"]


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


# --- what is compared -------------------------------------------------------------------------------------------

WRITTEN = LoopProfile(
    batch_size=16, batches_per_step=1,
    counts=(("clip", 1), ("zero", 1)), rates=((0.1,), (0.2,)), batches=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"batch_size": 8}, "batches hold 8 samples, not 16"),
        ({"batches_per_step": 2}, "every 2 batches, not every 1"),
        ({"batches": 9}, "9 batches, not 4"),
        ({"rates": ((0.1,), (0.3,))}, "learning rates differ"),
        ({"counts": (("clip", 2), ("zero", 1))}, "clips gradients 2 times as often"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], why: str) -> None:
    found = disagreement(WRITTEN, replace(WRITTEN, **change))
    assert why in found
    assert bool(found) == bool(why)


# --- which is taken ---------------------------------------------------------------------------------------------


def answer(slowdown: float, *, fits: bool = True, relaunch: Relaunch | None = None) -> DryRunAnswer:
    plan: dict[str, Any] = {"slowdown": slowdown, "estimate": {"peak_reserved": 3 * 1024**3}}
    seconds, memory = {"plan": 1.0}, {"plan": 1}
    releases = Releases("3.11.7", (("torch", "2.13.0"),))
    return DryRunAnswer(plan, "", LaunchPlan(), (), {}, fits, True, "", seconds, memory, releases, relaunch)


def in_bf16(option: str = "") -> Relaunch:
    notes = (Note(Message("needs {peak}", peak="1 GiB")),)
    estimate = Estimate(16, 1, 1, {}, {}, Phase("setup", 0, 0), "", "", "", "symbolic", notes=notes)
    return Relaunch("bf16", option, Baseline("32-true", 1, 16, 16, estimate, Reason(Why.FITS), 1.0, WRITTEN))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (answer(1.2), ""),
        (answer(1.1, fits=False), "takes 3.00 GiB, which does not fit"),
        (answer(2.0), "2.00 times"),
        (DryRunFailure.unsupported("it takes other steps"), "it takes other steps"),
    ],
)
def test_a_relaunch_is_taken_where_it_fits_and_costs_less(found: DryRunAnswer | DryRunFailure, said: str) -> None:
    taken = better_of(answer(1.5, relaunch=in_bf16()), lambda _relaunch: found)
    assert taken.slowdown == (1.5 if said else 1.2)
    assert [said in note and "--mixed_precision bf16" in note for note in taken.notes] == ([True] if said else [])
    assert taken.seconds == {"plan": 1.0 if isinstance(found, DryRunFailure) else 2.0}
    assert taken.relaunch is None


def test_a_relaunch_that_trains_otherwise_is_refused() -> None:
    in_bf16().check("bf16-mixed", WRITTEN)
    for precision, profile in (("32-true", WRITTEN), ("bf16-mixed", replace(WRITTEN, counts=(("clip", 2),)))):
        with pytest.raises(UnsupportedStepError):
            in_bf16().check(precision, profile)


def test_a_relaunch_is_told_as_it_would_be_typed_and_travels_as_text() -> None:
    """With all that it is compared with: the process that runs it dry is another one."""
    assert [in_bf16(option).words for option in ("", "--dtype")] == ["--mixed_precision bf16", "--dtype bf16"]
    made = answer(1.5, relaunch=in_bf16())
    assert from_json(DryRunAnswer, to_json(made)) == made
