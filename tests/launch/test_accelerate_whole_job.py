"""What a script does besides its training steps: real scripts, followed beyond their second step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from accelerate.checkpointing import save_accelerator_state

from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import ForkEntered
from vram_guard_accelerate.dry_run.time_limit import limit, processor_limit

SCRIPT = cases.HERE / "accelerate_scripts" / "whole_job.py"
DIFFUSION = cases.HERE / "accelerate_scripts" / "diffusion.py"
MIB = 2**20

#: Tokens that are generated.
TOKENS = (40, 64)

#: Logits of one validation batch of ``plain``: 128 rows of 512 numbers.
LOGITS = 128 * 512 * 4


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, output: Path) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = tmp_path_factory.mktemp("whole") / "asked"
    trainer = ("trainer", "--output_dir", output, "--report_to", "none", "--per_device_train_batch_size", 4)
    cases.request(asked / "few", SCRIPT, "plain", "--held_out", 512)
    cases.request(asked / "many", SCRIPT, "plain", "--held_out", 5120)
    cases.request(asked / "prepared", SCRIPT, "plain", "--held_out", 5120, "--prepared")
    cases.request(asked / "counted", SCRIPT, "counted", "--rounds", 40, "--held_out", 5120, "--prepared")
    for how in ("at once", "batch by batch"):
        cases.request(asked / how, SCRIPT, "plain", "--over_training", how)
    cases.request(asked / "endless", SCRIPT, "plain", "--endless")
    adam, sgd = (checkpoint(tmp_path_factory.mktemp("resumed"), kind) for kind in (torch.optim.AdamW, torch.optim.SGD))
    cases.request(asked / "resumed", SCRIPT, "plain", "--resume", adam)
    cases.request(asked / "resumed_sgd", SCRIPT, "plain", "--sgd", "--resume", sgd)
    cases.request(asked / "on_device", SCRIPT, "plain", "--sgd", "--resume", sgd, "--on_device")
    cases.request(asked / "two_processes", SCRIPT, "plain", "--sgd", "--resume", sgd, ranks=2)
    cases.request(asked / "not_a_checkpoint", SCRIPT, "plain", "--resume", output)
    cases.request(asked / "finally", SCRIPT, "plain", "--finally", 100_000)
    cases.request(asked / "many_epochs", SCRIPT, "plain", "--finally", 100_000, "--epochs", 40)
    cases.request(asked / "leaks", SCRIPT, "plain", "--leaks")
    cases.request(asked / "samples", SCRIPT, "plain", "--samples")
    cases.request(asked / "fails", SCRIPT, "plain", "--fails")
    cases.request(asked / "trainer", SCRIPT, *trainer, "--eval_strategy", "steps")
    for tokens in TOKENS:
        cases.request(asked / f"generation_{tokens}", SCRIPT, "generation", "--new_tokens", tokens)
        generates = ("--per_device_eval_batch_size", 256, "--predict_with_generate", "--generation_max_length", tokens)
        cases.request(
            asked / f"translation_{tokens}", SCRIPT, "translation", *trainer[1:], *generates, "--eval_strategy", "epoch"
        )
    by_epoch = (*trainer, "--eval_strategy", "epoch")
    cases.request(asked / "freed", SCRIPT, *by_epoch, "--eval_accumulation_steps", 4)
    cases.request(asked / "four_batches", SCRIPT, *by_epoch, "--held_out", 32)
    cases.request(asked / "evaluates_first", SCRIPT, *trainer, "--first")
    cases.request(asked / "never_evaluates", SCRIPT, *trainer)
    cases.request(asked / "bf16", SCRIPT, *trainer, "--bf16")
    cases.request(asked / "too_small", SCRIPT, *trainer, "--eval_strategy", "epoch", budget="100MiB")
    return cases.dry_runs(asked)


def checkpoint(folder: Path, optimizer: type[torch.optim.Optimizer]) -> Path:
    """What ``save_state`` of ``plain`` writes after a step."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))
    stepped = optimizer(model.parameters(), 0.1)
    model(torch.ones(1, 64)).sum().backward()
    stepped.step()
    save_accelerator_state(str(folder), [model.state_dict()], [stepped], [], [], 0, 1)
    return folder


def phases(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["plan"]["estimate"]["phases"]
    return found


def peak_of(answer: dict[str, Any], name: str) -> int:
    return max(phase["peak_allocated"] for phase in phases(answer) if phase["name"] == name)


def notes(answer: dict[str, Any]) -> list[str]:
    return [note["message"] for note in answer["plan"]["estimate"].get("notes") or ()]


def test_evaluation_saving_and_the_next_epoch_follow_the_first_steps(answers: dict[str, Any]) -> None:
    for name in ("few", "prepared"):
        assert [phase["name"] for phase in phases(answers[name])] == [
            *("setup", *("training", "validation", "saving") * 3)
        ]
        assert "leaks" not in answers[name]["plan"]["estimate"]


@pytest.mark.parametrize("name", ["many", "prepared"])
def test_what_an_evaluation_collects_is_counted_for_all_its_batches(answers: dict[str, Any], name: str) -> None:
    """Ten times the batches: nine times four logits more are kept, and concatenated."""
    few, many = (peak_of(answers[one], "validation") for one in ("few", name))
    more = 36 * LOGITS * 2
    assert many - few == pytest.approx(more, rel=0.02)


def test_a_training_that_calls_next_is_followed_for_its_steps_and_that_is_said(answers: dict[str, Any]) -> None:
    assert "phases" not in answers["counted"]["plan"]["estimate"], "there is nothing but steps"
    (said,) = notes(answers["counted"])
    assert "next" in said


def test_what_comes_later_inside_an_epoch_is_said_where_it_has_more_batches(answers: dict[str, Any]) -> None:
    (said,) = notes(answers["few"])
    assert "inside it was not followed" in said


def test_an_evaluation_over_the_trainings_own_loader_ends(answers: dict[str, Any]) -> None:
    for how in ("at once", "batch by batch"):
        assert not any("processor time" in said for said in notes(answers[how])), how
    assert [phase["name"] for phase in phases(answers["at once"])] == [
        *("setup", *("training", "validation", "saving") * 3)
    ]


def test_an_evaluation_without_an_end_is_bounded_and_said(answers: dict[str, Any]) -> None:
    assert [phase["name"] for phase in phases(answers["endless"])] == [
        *("setup", *("training", "validation", "saving") * 3)
    ]
    assert "the number of batches of an evaluation is not known: two are counted" in notes(answers["endless"])


def test_resuming_loads_as_accelerate_does(answers: dict[str, Any]) -> None:
    """Weights that are loaded on the device lie beside the fresh ones; AdamW's states are its own from then on."""
    weights = (64 * 256 + 256 + 256 * 512 + 512) * 4
    for name, copies in (("resumed", 3), ("resumed_sgd", 1), ("on_device", 2), ("two_processes", 2)):
        assert peak_of(answers[name], "resuming") - peak_of(answers[name], "setup") == (copies - 1) * weights, name
        assert not any("resuming" in note for note in answers[name]["notes"])
    fresh, resumed = (peak_of(answers[name], "training") for name in ("few", "resumed"))
    assert fresh == resumed


def test_a_checkpoint_that_cannot_be_loaded_is_said(answers: dict[str, Any]) -> None:
    (said,) = (note for note in answers["not_a_checkpoint"]["notes"] if "resuming" in note)
    assert "FileNotFoundError" in said


def test_the_line_that_keeps_memory_is_named(answers: dict[str, Any]) -> None:
    (leak,) = answers["leaks"]["plan"]["estimate"]["leaks"]
    lines = SCRIPT.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if "cross_entropy" in line)
    assert leak["source"].endswith(f"whole_job.py:{at}")
    assert leak["bytes_per_step"] == 512  # the least block: a loss is one number


def test_what_a_script_does_after_its_last_epoch_is_followed(answers: dict[str, Any]) -> None:
    """Where there are three epochs or fewer; a longer job is followed so far."""
    whole, part, rows = answers["finally"], answers["many_epochs"], 100_000 * (64 + 256 + 512) * 4
    assert peak_of(whole, "validation") > rows > 10 * peak_of(whole, "training")
    assert peak_of(part, "validation") < rows
    assert [phase["name"] for phase in phases(whole)].count("training") == 3
    assert [phase["name"] for phase in phases(part)].count("training") == 3
    assert len(notes(whole)) == 1
    assert any("3 epochs" in said for said in notes(part))


def test_a_forward_without_gradients_after_the_epoch_is_an_evaluation(answers: dict[str, Any]) -> None:
    assert peak_of(answers["samples"], "validation") > 100_000 * (64 + 256 + 512) * 4
    assert peak_of(answers["samples"], "training") < 100_000 * 256 * 4  # what it is made from comes before


def test_what_could_not_be_followed_is_said_and_the_steps_are_answered(answers: dict[str, Any]) -> None:
    answer = answers["fails"]
    assert [phase["name"] for phase in phases(answer)] == ["setup", "training", "validation"]
    said = [note for note in answer["plan"]["estimate"]["notes"] if "the metric is broken" in note["message"]]
    assert len(said) == 1
    assert "validation" in said[0]["message"]


def test_the_trainers_evaluation_keeps_all_logits_on_the_gpu(answers: dict[str, Any]) -> None:
    """Transformers' Trainer concatenates them batch by batch: old and new ones are there at once."""
    logits = 512 * 64 * 1024 * 4
    peak = peak_of(answers["trainer"], "validation")
    assert logits * (1 + 504 / 512) <= peak <= logits * (1 + 504 / 512) + 24 * MIB
    assert peak > 10 * peak_of(answers["trainer"], "training") / 2
    assert {phase["name"] for phase in phases(answers["trainer"])} >= {"validation", "saving", "training"}
    assert "validation" not in {phase["name"] for phase in phases(answers["never_evaluates"])}


def test_the_trainers_argument_moves_logits_to_the_host(answers: dict[str, Any]) -> None:
    """Of all 64 batches no more than four are on the GPU at once; without it, of four batches all are."""
    freed, four = (phases(answers[name]) for name in ("freed", "four_batches"))
    assert [phase["peak_reserved"] for phase in freed] == [phase["peak_reserved"] for phase in four]
    told = {name: "eval_accumulation_steps" in " ".join(answers[name]["notes"]) for name in answers}
    assert {name for name, said in told.items() if said} == {"trainer", "evaluates_first", "too_small"}


def test_an_evaluation_before_the_training_counts_all_its_batches(answers: dict[str, Any]) -> None:
    """Once each, whether a loop over the loader ends early, or calls ``next`` as often as it says."""
    assert peak_of(answers["evaluates_first"], "setup") >= 512 * 64 * 1024 * 4 * (1 + 504 / 512)
    counted = answers["counted"]["plan"]["estimate"]
    assert counted["peak"]["phase"] == "setup"
    assert 40 * LOGITS * 2 <= counted["peak_allocated"] <= 40 * LOGITS * 2 + 10 * MIB


@pytest.mark.parametrize("name", ["generation", "translation"])
def test_the_cache_of_a_generation_grows_with_every_token(answers: dict[str, Any], name: str) -> None:
    """Keys and values of two layers, and the old values of the layer that is at work beside its new ones."""
    few, many = (answers[f"{name}_{tokens}"] for tokens in TOKENS)
    copy = (TOKENS[1] - TOKENS[0]) * 256 * 128 * 4
    grown = peak_of(many, "validation") - peak_of(few, "validation")
    assert 4 * copy < grown < 5.05 * copy  # other things than the cache are beside it
    if name == "generation":
        assert grown == pytest.approx(5 * copy, rel=0.01)
    assert peak_of(many, "validation") > peak_of(many, "training")
    assert [phase["name"] for phase in phases(many)].count("training") == 2  # it comes to an end


def test_pictures_that_a_diffusion_pipeline_makes_are_an_evaluation(tmp_path: Path) -> None:
    """Eight denoising steps of the script's own pipeline, at twice as many samples as pictures, and its decoder."""
    pytest.importorskip("diffusers")
    for count in (4, 16):
        cases.request(tmp_path / f"asked/{count}", DIFFUSION, "--pictures", count, budget="20GiB")
    answers = cases.dry_runs(tmp_path / "asked")
    few, many = answers["4"], answers["16"]
    peaks = []
    for answer in (few, many):
        assert [phase["name"] for phase in phases(answer)] == ["setup", *("training", "validation") * 3]
        peaks.append({phase["name"]: phase["peak_allocated"] for phase in phases(answer)})
    assert peaks[0]["training"] == peaks[1]["training"] > peaks[0]["validation"]
    assert peaks[1]["validation"] - peaks[1]["setup"] == pytest.approx(
        4 * (peaks[0]["validation"] - peaks[0]["setup"]), rel=0.25
    )
    assert many["plan"]["estimate"]["peak"]["phase"] == "validation"


def test_a_run_whose_evaluation_does_not_fit_does_not_fit(answers: dict[str, Any]) -> None:
    answer = answers["too_small"]
    assert not answer["fits"]
    assert "validation" in answer["text"]
    assert max(phases(answer), key=lambda phase: phase["peak_reserved"])["name"] == "validation"


def test_arguments_of_a_trainer_find_a_gpu_with_bfloat16(answers: dict[str, Any]) -> None:
    """They look for it before anything of Accelerate's is made."""
    assert answers["bf16"]["plan"]["precision"]["before"] == "bf16-mixed", answers["bf16"]


def test_a_limit_that_runs_out_while_an_answer_is_sent_takes_nothing_from_it() -> None:
    """The alarm's own answer would end in the middle of the other one."""

    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(0.5)
            return (int, (7,))

    try:
        copy = forks.fork(None)
    except ForkEntered as entered:
        limit(0.1, lambda _frame: os._exit(3))
        entered.parent.send(Slow())
    assert copy.answer() == 7


@pytest.mark.parametrize(("works", "code"), [(True, 3), (False, 0)], ids=["works", "waits"])
def test_a_limit_of_processor_time_counts_no_waiting(works: bool, code: int) -> None:
    process = os.fork()
    if process == 0:
        processor_limit(0.2, lambda _frame: os._exit(3))
        while works:
            pass
        time.sleep(0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == code


def test_nothing_is_written(answers: dict[str, Any], output: Path) -> None:
    assert dict(answers)  # all of them
    assert not list(output.iterdir())
    assert not any(Path(name).exists() for name in ("checkpoints", "finished"))
