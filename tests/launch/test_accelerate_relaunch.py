"""Launches of a script in another way: which are tried and taken, and which are only told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vram_guard.limits import RELAUNCHES_TRIED

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from accelerate_cases import ONE, OPTIONS, TRAINER, launch  # noqa: E402

from vram_guard.codec import from_json, from_plain, to_json  # noqa: E402
from vram_guard.language import Message  # noqa: E402
from vram_guard.plan.descriptions import Reason, Why  # noqa: E402
from vram_guard.releases.installed import Releases  # noqa: E402
from vram_guard.timeline import Estimate, Note, Phase  # noqa: E402
from vram_guard_accelerate._launch_plan import LaunchPlan  # noqa: E402
from vram_guard_accelerate._sharding_change import ShardingChange  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile  # noqa: E402
from vram_guard_accelerate.dry_run.results import DryRunFailure  # noqa: E402
from vram_guard_accelerate.planning._best_relaunch import best_of  # noqa: E402
from vram_guard_accelerate.planning.requests import DryRunAnswer  # noqa: E402
from vram_guard_accelerate.relaunch.relaunch import Baseline, LaunchChange, Relaunch, disagreement  # noqa: E402

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
    complete=True, batch_size=16, batches_per_step=1, losses=("NllLossBackward0",),
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
        ({"losses": ()}, "other operators"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], why: str) -> None:
    found = disagreement(WRITTEN, replace(WRITTEN, **change))
    assert why in found
    assert bool(found) == bool(why)
    if "losses" in change:
        assert disagreement(WRITTEN, replace(WRITTEN, **change), losses=False) == ""


# --- which is taken ---------------------------------------------------------------------------------------------


def answer(slowdown: float, *, fits: bool = True, relaunches: tuple[Relaunch, ...] = ()) -> DryRunAnswer:
    plan: dict[str, Any] = {"slowdown": slowdown, "estimate": {"peak_reserved": 3 * 1024**3}}
    seconds, memory = {"plan": 1.0}, {"plan": 1}
    releases = Releases("3.11.7", (("torch", "2.13.0"),))
    return DryRunAnswer(plan, "", LaunchPlan(), (), relaunches, {}, fits, True, "", seconds, memory, releases)


def changed(**change: Any) -> Relaunch:
    notes = (Note(Message("needs {peak}", peak="1 GiB")),)
    estimate = Estimate(16, 1, 1, {}, {}, Phase("setup", 0, 0), "", "", "", "symbolic", notes=notes)
    return Relaunch(LaunchChange(**change), Baseline("32-true", 1, 16, 16, estimate, Reason(Why.FITS), 1.0, WRITTEN))


def test_the_cheapest_that_fits_is_taken() -> None:
    mixed, divided = changed(precision="bf16"), changed(sharding=ShardingChange(stage=3))
    words = [one.change.words for one in (mixed, divided)]
    runs = dict(zip(words, (answer(1.1, fits=False), answer(1.2)), strict=True))
    tried: list[str] = []
    taken = best_of(answer(1.5, relaunches=(mixed, divided)), lambda one: runs[one.change.words], tried.append)
    assert tried == words
    assert taken.slowdown == 1.2
    assert taken.seconds == {"plan": 3.0}
    assert any(words[0] in note and "takes 3.00 GiB, which does not fit" in note for note in taken.notes)


def test_states_on_the_host_are_tried_alone_before_another_stage_is_added() -> None:
    stage, states, both = (
        changed(sharding=ShardingChange(**one))
        for one in ({"stage": 3}, {"states_on_host": True}, {"stage": 3, "states_on_host": True})
    )
    runs = {stage.change: answer(1.5, fits=False, relaunches=(both,)), states.change: answer(2.0)}
    taken = best_of(answer(1.0, fits=False, relaunches=(stage, states)), lambda one: runs[one.change])
    assert (taken.fits, taken.slowdown) == (True, 2.0)


def test_a_relaunch_that_fails_or_costs_more_leaves_the_plan_as_it_was() -> None:
    relaunches = [changed(precision="bf16"), *(changed(sharding=ShardingChange(stage=one)) for one in (2, 3))]
    failed = DryRunFailure.unsupported("it takes other steps")
    tried: list[str] = []
    first = answer(1.5, relaunches=tuple(relaunches))
    taken = best_of(first, lambda one: answer(2.0) if len(tried) == 1 else failed, tried.append)
    assert taken.slowdown == 1.5
    assert tried == [one.change.words for one in relaunches[:2]]  # more of that would be the same other training
    assert any("2.00 times" in note for note in taken.notes)
    assert any("it takes other steps" in note for note in taken.notes)


def test_relaunches_of_relaunches_come_to_an_end() -> None:
    tried: list[str] = []

    def better(_relaunch: Relaunch) -> DryRunAnswer:
        more = changed(precision="bf16", precision_option=f"--precision{len(tried)}")
        return answer(9.0 - len(tried), relaunches=(more, changed(precision="bf16")))

    best_of(answer(9.0, relaunches=(changed(precision="bf16"),)), better, tried.append)
    assert len(tried) == RELAUNCHES_TRIED
    assert tried.count("--mixed_precision bf16") == 1


def test_a_relaunch_travels_as_text() -> None:
    """With all that it is compared with: the process that runs it dry is another one."""
    made = changed(precision="bf16", sharding=ShardingChange(stage=3))
    assert from_json(Relaunch, to_json(made)) == made
    text = to_json(answer(1.5, relaunches=(made,)))
    assert from_json(DryRunAnswer, text) == answer(1.5, relaunches=(made,))
    assert from_json(DryRunAnswer | DryRunFailure, text).relaunches == (made,)  # type: ignore[arg-type,union-attr]
