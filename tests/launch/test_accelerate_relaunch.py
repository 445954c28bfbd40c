"""Variants of a launch: a script's own options set for it, where they are shown to leave the training as it was."""

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
from accelerate_cases import ONE, OPTIONS, TRAINER, TWO, difference, launch  # noqa: E402

from vram_guard.apply.loss_terms import Term  # noqa: E402
from vram_guard.capture.loader import Sample  # noqa: E402
from vram_guard.codec import from_json, from_plain, to_json  # noqa: E402
from vram_guard.language import Message  # noqa: E402
from vram_guard.plan.descriptions import Reason, Why  # noqa: E402
from vram_guard.releases.installed import Releases  # noqa: E402
from vram_guard.timeline import Estimate, Note, Phase  # noqa: E402
from vram_guard_accelerate._launch_plan import VARIABLE, LaunchPlan  # noqa: E402
from vram_guard_accelerate._sharding_change import ShardingChange  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopObserver, LoopProfile  # noqa: E402
from vram_guard_accelerate.dry_run.results import DryRunFailure  # noqa: E402
from vram_guard_accelerate.planning._best_relaunch import MOST, best_of  # noqa: E402
from vram_guard_accelerate.planning.requests import DryRunAnswer  # noqa: E402
from vram_guard_accelerate.relaunch.equivalence import disagreement, why_not_accumulated  # noqa: E402
from vram_guard_accelerate.relaunch.relaunch import Baseline, LaunchChange, Relaunch  # noqa: E402

ON_GRAPH = "smaller batches: proven by the loss graph; 4 samples, run whole and in halves, came to the same"
SET = ["--batch_size", "8", "--gradient_accumulation_steps", "2"]
HALVED = LaunchPlan(batch_size=8, grown_batch_size=8, micro_batch_size=8, batch_option=SET[0],
                accumulation_option=SET[2], accumulation=2)  # fmt: skip
TRAINER_ARGUMENTS = {
    "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1, "samples": 64,
    "per_device_train_batch_size": 16, "torch_compile": True, "torch_compile_backend": "eager",
}  # fmt: skip


# --- the dry runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("variants")
    asked = folder / "asked"
    for name in ("by_hand", "undivided", "per_batch", "compares", "centred", "counted"):
        cases.request(asked / name, OPTIONS, name, "--out", "never.pt", budget="45MiB", allow=("accumulate",))
    for name in ("by_hand", "compares", "centred", "frozen", "flooded", "shifted", "keeps", "later"):
        cases.request(asked / f"{name}_not_run", OPTIONS, name, "--out", "never.pt", budget="45MiB",
                      allow=("accumulate",), proof_seconds=0)  # fmt: skip
    cases.request(asked / "asks", OPTIONS, "asks", budget="60MiB", allow=("precision", "accumulate"))
    given = {**TRAINER_ARGUMENTS, "output_dir": str(folder / "trainer")}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    cases.request(asked / "trainer", TRAINER, *words, budget="80MiB", allow=("accumulate",))
    words = [word for name, value in given.items() if "compile" not in name for word in (f"--{name}", str(value))]
    cases.request(asked / "trainer_mixed", TRAINER, *words, budget="90MiB", allow=("precision",))
    cases.request(asked / "by_items", TRAINER, *words, "--by_items", "true", budget="80MiB", allow=("accumulate",))
    settings = folder / "settings.json"
    settings.write_text(json.dumps(given))
    cases.request(asked / "from_a_file", TRAINER, settings, budget="80MiB", allow=("accumulate",))
    return cases.dry_runs(asked)


def test_options_are_set_where_slices_would_run_forwards_twice(answers: Any) -> None:
    answer = answers["by_hand"]
    assert "error" not in answer, answer
    assert answer["tried"] == [" ".join(SET)]
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == SET
    plan = answer["plan"]
    assert (plan["accumulate"], plan["batch_size"]) == ({"before": 1, "after": 2}, {"before": 16, "after": 8})
    assert plan["estimate"]["peak_reserved"] <= 45 * 2**20 < plan["before"]["peak_reserved"]
    assert any("seen in a dry run of its own" in note for note in answer["notes"])
    assert ON_GRAPH in answer["notes"]
    # What it costs is more small operators, and no second forward.
    assert plan["slowdown"] < answers["undivided"]["plan"]["slowdown"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("undivided", "gradients would be 2 times as large"),
        ("per_batch", "learning rates differ, from optimizer step 1 on"),
        ("compares", "4 samples were run, and differed: the gradient of"),
        ("centred", "4 samples were run, and differed: the gradient of"),
        ("counted", "later steps may not, so that half the batch, typed by hand, may be another training"),
    ],
)
def test_options_that_make_another_training_are_left_alone(answers: Any, name: str, why: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert answer["fits"]
    assert answer["launch_plan"]["micro_batch_size"] == 8  # in slices, instead
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == []
    assert any("--gradient_accumulation_steps" in note and why in note for note in answer["notes"]), answer["notes"]
    assert any("forward of each micro-batch runs twice" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("compares", "mm"),
        ("centred", "aten.sub"),
        ("shifted", "aten.sub"),
        ("flooded", "AbsBackward0"),
        ("keeps", "earlier batch"),
        ("later", "aten.sub"),
    ],
)
def test_samples_that_meet_outside_the_models_are_known_without_a_run(answers: Any, name: str, why: str) -> None:
    answer = answers[f"{name}_not_run"]
    assert "tried" not in answer
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == []
    assert any("--gradient_accumulation_steps" in note and why in note for note in answer["notes"]), answer["notes"]


@pytest.mark.parametrize("name", ["by_hand", "frozen"])
def test_options_are_set_without_a_run_where_the_graph_shows_all_of_it(answers: Any, name: str) -> None:
    answer = answers[f"{name}_not_run"]
    assert from_plain(LaunchPlan, answer["launch_plan"]).script_arguments() == SET, answer["notes"]


def test_a_script_that_acts_on_its_precision_is_seen_to_do_so(answers: Any) -> None:
    answer = answers["asks"]
    assert "error" not in answer, answer
    assert answer["launch_plan"]["precision"] == "bf16"
    before, after = (answer["plan"][which]["breakdown"]["parameters"] for which in ("before", "estimate"))
    # Its frozen encoder has a million weights, which the script itself halves.
    assert before - after == pytest.approx(2_000_000, abs=512)
    assert not any("mixed precision is not possible" in note for note in answer["notes"])


def test_transformers_trainer_sets_its_own_options_where_it_cannot_be_sliced(answers: Any) -> None:
    answer = answers["trainer"]
    assert "error" not in answer, answer
    given = from_plain(LaunchPlan, answer["launch_plan"]).script_arguments()
    assert given == ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
    assert answer["fits"]


def test_losses_that_a_trainer_divides_by_the_items_of_a_step_are_cut_by_its_options(answers: Any) -> None:
    """Halves have labels in different numbers: each counts for its share of them."""
    answer = answers["by_items"]
    assert "error" not in answer, answer
    given = from_plain(LaunchPlan, answer["launch_plan"]).script_arguments()
    assert given == ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"], answer["notes"]
    assert ON_GRAPH in answer["notes"]


def test_transformers_trainer_takes_the_precision_of_its_environment(answers: Any) -> None:
    answer = answers["trainer_mixed"]
    assert "error" not in answer, answer
    assert answer["tried"] == ["--mixed_precision bf16"]
    assert (answer["launch_plan"]["precision"], answer["launch_plan"]["precision_option"]) == ("bf16", "")
    assert answer["fits"]


def test_options_in_a_file_of_settings_are_not_appended_to(answers: Any) -> None:
    answer = answers["from_a_file"]
    assert "error" not in answer, answer
    assert "tried" not in answer
    assert not answer["fits"]
    assert any("torch.compile" in note for note in answer["notes"])


# --- launches ---------------------------------------------------------------------------------------------------


def test_a_launch_with_its_options_set_is_the_same_training(tmp_path: Path) -> None:
    out, guarded = tmp_path / "written.pt", tmp_path / "set.pt"
    plain = launch(*ONE, OPTIONS, "accumulated", "--out", out, cache=tmp_path, guarded=False)
    budget = ("--budget", "45MiB", "--margin", "0", "--allow", "accumulate")
    done = launch(*ONE, *budget, OPTIONS, "accumulated", "--out", guarded, cache=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert " ".join(SET) in done.stderr
    written, halved = torch.load(out), torch.load(guarded)
    same_training(written, halved)


def test_two_processes_with_their_options_set_are_the_same_training(tmp_path: Path) -> None:
    more = {"ACCELERATE_USE_CPU": "true"}
    folders = [tmp_path / name for name in ("written", "set")]
    for folder, own in zip(folders, [(), ("-m", "vram_guard_accelerate")], strict=True):
        folder.mkdir()
        orders = {VARIABLE: to_json(HALVED)} if own else {}
        done = launch(*TWO, *own, OPTIONS, "several", "--out", folder, cache=tmp_path, guarded=False, **more, **orders)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in ("accumulated", "by_hand"):
        written, halved = (torch.load(folder / f"{name}.pt") for folder in folders)
        assert written["processes"] == 2
        same_training(written, halved)


def same_training(written: Any, halved: Any) -> None:
    assert 0 < difference(written, halved) < 2e-6
    assert written["rates"] == halved["rates"]
    assert len(halved["losses"]) == 2 * len(written["losses"])
    pairs = [sum(halved["losses"][at : at + 2]) / 2 for at in range(0, len(halved["losses"]), 2)]
    assert pairs == pytest.approx(written["losses"], rel=1e-5)


# --- what is compared -------------------------------------------------------------------------------------------

WRITTEN = LoopProfile(
    complete=True, batch_size=16, batches_per_step=1, losses=((Term("mean", 1.0, (16,), labels=True),),),
    counts=(("clip", 1), ("zero", 1)), rates=((0.1,), (0.2,), (0.3,)), rates_unknown="", batches=4, samples=64,
    drops_last=False, bars=(8,), counts_items=False,
)  # fmt: skip
HALF = replace(
    WRITTEN, batch_size=8, batches_per_step=2, losses=((Term("mean", 0.5, (8,), labels=True),),) * 2, batches=8
)


def test_halves_of_a_batch_are_the_batch() -> None:
    assert why_not_accumulated(WRITTEN, 2) == ""
    assert disagreement(WRITTEN, HALF, 2, 1) == ""
    summed, halved = (((Term("sum", 0.1, (size, 5)),),) * count for size, count in ((16, 1), (8, 2)))
    assert disagreement(replace(WRITTEN, losses=summed), replace(HALF, losses=halved), 2, 1) == ""
    # A bar over the loader grows with it, one over optimizer steps does not.
    assert disagreement(replace(WRITTEN, bars=(8, 4)), replace(HALF, bars=(8, 8)), 2, 1) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch_size": 16}, "batches hold 16 samples, not 8"),
        ({"batches_per_step": 1}, "every 1 batches, not every 2"),
        ({"batches": 9}, "9 batches, not 8"),
        ({"rates": ((0.1,), (0.2,), (0.25,))}, "from optimizer step 3 on"),
        ({"rates": ((0.1,), (0.2,))}, "from optimizer step 3 on"),
        ({"rates_unknown": "set by the loop"}, "by itself"),
        ({"counts": (("clip", 2), ("zero", 1))}, "clips gradients 2 times as often"),
        ({"bars": (16,)}, "its own count of steps"),
        ({"losses": ((Term("mean", 1.0, (8,), labels=True),),) * 2}, "gradients would be 2 times as large"),
        ({"losses": HALF.losses[:1]}, "different parts"),
        ({"losses": ((Term("mean", 0.5, (8, 2), labels=True),),) * 2}, "different parts"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], why: str) -> None:
    assert why in disagreement(WRITTEN, replace(HALF, **change), 2, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"samples": 60}, "short"),
        ({"samples": None}, "end of its data is not known"),
        ({"complete": False}, "no second optimizer step"),
        ({"rates_unknown": "measured"}, "a schedule that follows"),
        ({"losses": ((Term("DivBackward0", 1.0, ()),),)}, "DivBackward0"),
        ({"losses": ((Term("mean", 1.0, (16 * 256,), labels=True),),)}, "labels of which some may not count"),
        ({"losses": ((Term("mean", 1.0, (16,), labels=True, weighed=True),),)}, "labels of which some may not count"),
    ],
)
def test_what_cannot_be_shown_is_not_tried(change: dict[str, Any], why: str) -> None:
    assert why in why_not_accumulated(replace(WRITTEN, **change), 1)


def test_a_short_batch_that_is_left_out_does_not_matter() -> None:
    """Of 70 samples, 4 batches of 16 train, and 8 of 8; but 73 leave a ninth, and 100 one more for two processes."""
    written = replace(WRITTEN, samples=70, drops_last=True)
    assert why_not_accumulated(written, 1) == ""
    assert disagreement(written, replace(HALF, samples=70, drops_last=True), 2, 1) == ""
    assert "9 batches, not 8" in disagreement(written, replace(HALF, samples=73, batches=9, drops_last=True), 2, 1)
    written = replace(written, samples=100, batches=6)
    assert disagreement(written, replace(HALF, samples=100, batches=12), 2, 2) == ""
    assert "7 batches, not 6" in disagreement(written, replace(HALF, samples=100, batches=14), 2, 2)


def test_a_number_of_items_settles_how_tokens_are_weighed() -> None:
    tokens = ((Term("DivBackward0", 1.0, ()),),)
    assert why_not_accumulated(replace(WRITTEN, losses=tokens, counts_items=True), 1) == ""


@pytest.mark.parametrize(("by_hand", "unknown"), [(False, ""), (True, "set by the loop")])
def test_rates_are_known_of_an_optimizer_that_is_wrapped_twice_and_steps_group_by_group(
    by_hand: bool, unknown: str
) -> None:
    """As DeepSpeed's: one group in two parts, the other after it."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    inner = torch.optim.SGD([{"params": [weights[0]], "lr": 1.0}, {"params": [weights[1]], "lr": 0.5}])
    outer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # of another object, with the inner one's groups
    outer.param_groups = inner.param_groups
    observer = LoopObserver()
    scheduler = torch.optim.lr_scheduler.LambdaLR(outer, lambda step: 1 / (1 + step))
    observer._scheduler_made(None, (scheduler,), {})
    groups = inner.param_groups
    for step in range(2):
        for group in (groups[0], groups[0], groups[1]):
            inner.param_groups = [group]
            observer._before_step(inner)
        inner.param_groups = groups
        observer.stepped()
        if step == 0:  # where the second step ends, the dry run does
            outer.step()  # torch warns of schedules that move before
            scheduler.step()
            groups[1]["lr"] *= 2 if by_hand else 1
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
    profile = observer.profile(Sample(lambda _size: None, 2, 8, loader, lambda _size: None), 1)
    assert profile.rates_unknown == unknown
    assert profile.rates[:2] == ((1.0, 0.5), (0.5,) if by_hand else (0.5, 0.25))
    assert by_hand or profile.rates[2] == pytest.approx((1 / 3, 1 / 6))


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
    halves, quarters = (changed(splits=n, batch_option="--batch", batch_size=16 // n) for n in (2, 4))
    runs = {"--batch 8": answer(1.1, fits=False), "--batch 4": answer(1.2)}
    tried: list[str] = []
    taken = best_of(answer(1.5, relaunches=(halves, quarters)), lambda one: runs[one.change.words], tried.append)
    assert tried == ["--batch 8", "--batch 4"]
    assert taken.slowdown == 1.2
    assert taken.seconds == {"plan": 3.0}
    assert any("--batch 8" in note and "takes 3.00 GiB, which does not fit" in note for note in taken.notes)


def test_states_on_the_host_are_tried_alone_before_another_stage_is_added() -> None:
    stage, states, both = (
        changed(sharding=ShardingChange(**one))
        for one in ({"stage": 3}, {"states_on_host": True}, {"stage": 3, "states_on_host": True})
    )
    runs = {stage.change: answer(1.5, fits=False, relaunches=(both,)), states.change: answer(2.0)}
    taken = best_of(answer(1.0, fits=False, relaunches=(stage, states)), lambda one: runs[one.change])
    assert (taken.fits, taken.slowdown) == (True, 2.0)


def test_a_relaunch_that_fails_or_costs_more_leaves_the_plan_as_it_was() -> None:
    relaunches = (changed(precision="bf16"), changed(splits=2, batch_option="--batch", batch_size=8))
    relaunches = (*relaunches, changed(splits=4, batch_option="--batch", batch_size=4))
    failed = DryRunFailure.unsupported("it takes other steps")
    tried: list[str] = []
    first = answer(1.5, relaunches=relaunches)
    taken = best_of(first, lambda one: answer(2.0) if len(tried) == 1 else failed, tried.append)
    assert taken.slowdown == 1.5
    assert tried == ["--mixed_precision bf16", "--batch 8"]  # smaller parts of it would be the same other training
    assert any("2.00 times" in note for note in taken.notes)
    assert any("it takes other steps" in note for note in taken.notes)


def test_relaunches_of_relaunches_come_to_an_end() -> None:
    tried: list[str] = []

    def better(_relaunch: Relaunch) -> DryRunAnswer:
        return answer(9.0 - len(tried), relaunches=(changed(splits=2 ** len(tried)), changed(precision="bf16")))

    best_of(answer(9.0, relaunches=(changed(precision="bf16"),)), better, tried.append)
    assert len(tried) == MOST
    assert tried.count("--mixed_precision bf16") == 1


def test_a_relaunch_travels_as_text() -> None:
    """With all that it is compared with: the process that runs it dry is another one."""
    made = changed(splits=2, batch_option="--batch", batch_size=8)
    assert from_json(Relaunch, to_json(made)) == made
    text = to_json(answer(1.5, relaunches=(made,)))
    assert from_json(DryRunAnswer, text) == answer(1.5, relaunches=(made,))
    assert from_json(DryRunAnswer | DryRunFailure, text).relaunches == (made,)  # type: ignore[arg-type,union-attr]
