"""The dry run: a script's own loop, followed symbolically. Real scripts, real processes, answers from all of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from accelerate_cases import TRAINER, TRAINING

from vram_guard.step import TrainingStep

TRAINER_ARGUMENTS = ("--report_to", "none", "--disable_tqdm", "true", "--per_device_train_batch_size", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dry")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = folder / "asked"
    writes = folder / "writes"
    writes.mkdir()
    (writes / "kept.txt").write_text("kept")
    never = ("never.pt",)
    for name in ("plain", "clipping", "accumulate", "modulo", "adversarial", "diffusion"):
        cases.request(asked / name, TRAINING, name, "--out", *never)
    for name in ("asks", "never", "stepless", "fails", "spawns", "drifting", "frozen", "unprepared"):
        cases.request(asked / name, TRAINING, name, "--out", *never)
    cases.request(asked / "writes", TRAINING, "writes", "--out", writes)
    cases.request(asked / "slices", TRAINING, "plain", budget="40MiB", allow=("slices",))
    cases.request(asked / "sliced_inside", TRAINING, "clipping", budget="40MiB", allow=("slices",))
    cases.request(asked / "ranks", TRAINING, "plain", ranks=2)
    cases.request(asked / "blocks", TRAINING, "plain", "--batch_size", 64, "--samples", 128, budget="112MiB",
                  allow=("checkpoint",))  # fmt: skip
    for name in ("checkpoint", "offload_activations"):
        cases.request(asked / f"fetching_{name}", TRAINING, "fetching", "--batch_size", 64, "--samples", 256,
                      budget="112MiB", allow=(name,))  # fmt: skip
    cases.request(asked / "remembers", TRAINING, "remembers", budget="40MiB", allow=("slices",))
    cases.request(asked / "remembering_blocks", TRAINING, "remembers", "--batch_size", 64, "--samples", 128,
                  budget="112MiB", allow=("checkpoint",))  # fmt: skip
    cases.request(asked / "mixed", TRAINING, "plain", "--batch_size", 64, "--samples", 128, budget="115MiB",
                  allow=("precision",))  # fmt: skip
    cases.request(asked / "half", TRAINING, "clipping", "--batch_size", 64, "--samples", 128, budget="115MiB",
                  gpu="RTX 2080 Ti", allow=("precision", "slices"))  # fmt: skip
    cases.request(asked / "compiled", TRAINING, "compiled", budget="40MiB", allow=("slices",))
    cases.request(asked / "by_inductor", TRAINING, "by_inductor", whole_job=False)
    cases.request(asked / "reduce_overhead", TRAINING, "reduce_overhead", whole_job=False)
    for name in ("contrastive", "summed", "masked", "beside", "accumulate"):
        cases.request(asked / f"sliced_{name}", TRAINING, name, budget="40MiB", allow=("slices",))
    cases.request(asked / "explicit_mixed", TRAINING, "explicit", "--batch_size", 64, "--samples", 128,
                  budget="115MiB", allow=("precision",))  # fmt: skip
    cases.request(asked / "grown", TRAINING, "plain", budget="160MiB", grow=True, lr_rule="linear")
    cases.request(asked / "scaling", TRAINING, "plain", "--scale_lr", budget="160MiB", grow=True, lr_rule="linear")
    cases.request(asked / "nothing", TRAINING, "plain", budget="1MiB", allow=("precision", "checkpoint"))
    cases.request(asked / "one_step", TRAINER, "--output_dir", folder / "one_step", *TRAINER_ARGUMENTS,
                  "--max_steps", 1, "--out", *never, budget="8MiB", allow=("checkpoint",))  # fmt: skip
    cases.request(asked / "trainer", TRAINER, "--output_dir", folder / "trainer", *TRAINER_ARGUMENTS, "--out", *never)
    return cases.dry_runs(asked)


@pytest.mark.parametrize(
    "name", ["plain", "clipping", "accumulate", "modulo", "adversarial", "diffusion", "trainer", "frozen"]
)
def test_loops_of_every_kind_are_followed_to_their_second_step(answers: Any, name: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert answer["plan"]["before"]["peak_reserved"] > 10 * 2**20
    assert answer["fits"]
    assert not answer["changed"]


def test_the_prediction_is_that_of_the_same_step_traced_by_itself(answers: Any) -> None:
    import torch
    from torch import nn

    from vram_guard.simulate import estimate

    sys.path.insert(0, str(TRAINING.parent))
    try:
        from common import Network
    finally:
        sys.path.pop(0)
    step = TrainingStep(
        Network(),
        lambda size: (torch.zeros(size, 256, 4), torch.zeros(size, dtype=torch.long)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    expected = estimate(step, 16)
    found = answers["plain"]["plan"]["before"]
    # The loop loads a batch while the last one is still held, and keeps its last loss; that is all.
    assert found["peak_allocated"] == pytest.approx(expected.peak_allocated, rel=0.01)
    assert found["peak_reserved"] == expected.peak_reserved
    for category in ("parameters", "optimizer_states", "workspace"):
        assert found["breakdown"][category] == expected.breakdown[category]


def test_memory_is_laid_to_the_scripts_lines_and_not_to_ours(answers: Any) -> None:
    """Where a loss outside the model makes gradients of the outputs, only wrappers of ours stand above torch."""
    for name in ("plain", "slices", "clipping"):
        plan = answers[name]["plan"]
        assert "training.py" in json.dumps(plan) or "common.py" in json.dumps(plan)
        assert not re.search(r"accelerate/\w+\.py", json.dumps(plan)), f"{name}: the script calls its backward and step"


def test_frozen_models_that_were_moved_by_hand_are_counted(answers: Any) -> None:
    more = answers["frozen"]["plan"]["before"]["breakdown"]["parameters"]
    assert more - answers["plain"]["plan"]["before"]["breakdown"]["parameters"] == pytest.approx(4_000_000, abs=512)


def test_accumulation_counts_what_the_loop_does(answers: Any) -> None:
    for name, batches in (("plain", 1), ("accumulate", 2), ("modulo", 2), ("adversarial", 1)):
        assert answers[name]["plan"]["accumulate"]["before"] == batches, name


@pytest.mark.torch_since(2, 6)
def test_several_processes_have_gradient_buckets(answers: Any) -> None:
    alone, together = (answers[name]["plan"]["before"]["peak_allocated"] for name in ("plain", "ranks"))
    assert together > alone


def test_a_batch_that_is_too_large_passes_in_slices(answers: Any) -> None:
    answer = answers["slices"]
    plan, slices = answer["plan"], answer["launch_plan"]["recipe"]["slices"]
    assert plan["fits"]
    assert slices["body"] == {"name": "", "cut": ["0"], "whole": []}
    assert 1 <= slices["again"] <= slices["count"] <= 16
    assert plan["estimate"]["peak_reserved"] <= 40 * 2**20 < plan["before"]["peak_reserved"]


@pytest.mark.parametrize("name", ["contrastive", "summed", "masked"])
def test_a_model_that_computes_its_loss_beside_its_blocks_has_no_body(answers: Any, name: str) -> None:
    answer = answers[f"sliced_{name}"]
    assert "error" not in answer, answer
    assert not answer["fits"]
    assert answer["launch_plan"]["recipe"]["slices"] is None


@pytest.mark.parametrize("name", ["inside", "beside", "accumulate"])
def test_whatever_the_loss_is_the_body_below_it_passes_in_slices(answers: Any, name: str) -> None:
    answer = answers[f"sliced_{name}"]
    assert "error" not in answer, answer
    assert answer["fits"], answer["plan"]["reasons"]
    assert answer["launch_plan"]["recipe"]["slices"]["body"]["name"] in ("", "network")


def test_as_many_blocks_are_checkpointed_as_needed(answers: Any) -> None:
    answer = answers["blocks"]
    assert answer["fits"]
    assert answer["launch_plan"]["recipe"]["checkpoint"]
    assert set(answer["launch_plan"]["recipe"]["checkpoint"]) <= {f"blocks.{number}" for number in range(4)}


@pytest.mark.parametrize("technique", ["checkpoint", "offload_activations"])
def test_blocks_are_treated_where_several_batches_are_loaded_before_a_forward(answers: Any, technique: str) -> None:
    answer = answers[f"fetching_{technique}"]
    assert answer["fits"], answer
    assert answer["plan"]["accumulate"]["before"] == 2
    assert answer["launch_plan"]["recipe"][technique]


def test_forwards_that_must_not_run_twice_do_not(answers: Any) -> None:
    """Slices run a part of the forward again; so does checkpointing."""
    sliced, checkpointed = answers["remembers"], answers["remembering_blocks"]
    assert not sliced["changed"]
    assert "slices of the batch are not possible here" in " ".join(sliced["plan"]["reasons"])
    assert set(checkpointed["launch_plan"]["recipe"]["checkpoint"]) <= {"blocks.2", "blocks.3"}
    said = " ".join(checkpointed["plan"]["reasons"])
    assert "blocks.0-1 (Remembers) cannot be checkpointed: the forward changes means" in said


def test_mixed_precision_is_planned_where_the_script_leaves_it_open(answers: Any) -> None:
    assert answers["mixed"]["launch_plan"]["precision"] == "bf16"
    assert answers["mixed"]["fits"]


@pytest.mark.torch_since(2, 6)
def test_compiled_models_are_predicted_and_not_cut_open(answers: Any) -> None:
    answer = answers["compiled"]
    assert "error" not in answer, answer
    assert not answer["fits"]
    assert any("slices" in reason and "torch.compile" in reason for reason in answer["plan"]["reasons"])
    assert answer["plan"]["compiled"]["followed"]  # by Dynamo's backend that compiles nothing


@pytest.mark.torch_since(2, 6)
def test_accelerates_compiled_step_is_shown_beside_the_eager_one(answers: Any) -> None:
    answer = answers["by_inductor"]
    assert "error" not in answer, answer
    compiled = answer["plan"]["compiled"]
    assert (compiled["followed"], compiled["why"], compiled["breaks"]) == (True, "", [])
    assert compiled["graphs"] >= 2
    assert answer["plan"]["estimate"]["tier"] == "symbolic"
    assert answer["plan"]["estimate"]["peak_allocated"] < compiled["eager"]["peak_allocated"]
    assert "uncompiled" in answer["text"]


@pytest.mark.torch_since(2, 6)
def test_accelerates_step_that_cannot_be_followed_compiled_is_counted_as_eager_and_said(answers: Any) -> None:
    answer = answers["reduce_overhead"]
    assert "error" not in answer, answer
    compiled = answer["plan"]["compiled"]
    assert not compiled["followed"]
    assert "CUDA graphs" in compiled["why"]
    assert answer["plan"]["estimate"]["peak_reserved"] == compiled["eager"]["peak_reserved"]
    assert answer["plan"]["estimate"]["tier"] == "partly symbolic"


def test_an_older_gpu_gets_float16_with_its_scaler(answers: Any) -> None:
    assert "error" not in answers["half"], answers["half"]
    assert answers["half"]["launch_plan"]["precision"] == "fp16"
    assert answers["half"]["fits"]


def test_a_scripts_own_precision_wins_and_that_is_said(answers: Any) -> None:
    answer = answers["explicit_mixed"]
    assert not answer["fits"]
    assert any("passes its own mixed_precision" in note for note in answer["notes"])


def test_growth_multiplies_batch_and_learning_rate(answers: Any) -> None:
    orders = answers["grown"]["launch_plan"]
    factor = orders["grown_batch_size"] / 16
    assert factor >= 2
    assert orders["learning_rate_factor"] == factor
    assert orders["batch_option"] == "--batch_size"  # the script offers it
    # It would multiply its rates by that option itself: once is enough.
    assert answers["scaling"]["launch_plan"]["learning_rate_factor"] == factor
    assert answers["scaling"]["launch_plan"]["batch_option"] == ""


def test_where_nothing_fits_nothing_is_changed(answers: Any) -> None:
    answer = answers["nothing"]
    assert not answer["fits"]
    assert not answer["changed"]
    assert "Closest" in answer["text"]


def test_a_script_of_one_step_is_planned_for(answers: Any) -> None:
    """Its work is that of the only step, which sets things up as well."""
    answer = answers["one_step"]
    assert "error" not in answer, answer
    assert not answer["fits"]
    assert answer["plan"]["slowdown"] is None or answer["plan"]["slowdown"] > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("asks", "reads from standard input"),
        ("never", "without asking for a training batch"),
        ("stepless", "without an optimizer step"),
        ("fails", "ValueError: Expected input batch_size (4) to match target batch_size (3)"),
        ("spawns", "torch.multiprocessing.spawn"),
        ("drifting", "LocalSGD"),
        ("unprepared", "it trains without Accelerate"),
    ],
)
def test_a_script_that_cannot_be_followed_says_where_and_why(answers: Any, name: str, says: str) -> None:
    answer = answers[name]
    assert answer["error"] == "UnsupportedStepError"
    assert says in answer["message"]
    if name in ("asks", "fails", "spawns", "drifting"):
        lines = TRAINING.read_text(encoding="utf-8").splitlines()
        number = int(answer["message"].rsplit("training.py, line ", 1)[1].rstrip(")"))
        begins = lines.index(f"def {name}(options):") + 1
        assert begins < number <= begins + 10


def test_nothing_is_written_or_removed(answers: Any, folder: Path) -> None:
    assert "error" not in answers["writes"], answers["writes"]
    assert [path.name for path in (folder / "writes").iterdir()] == ["kept.txt"]
    assert not (folder / "trainer").exists() or not any((folder / "trainer").iterdir())
    assert not Path("never.pt").exists()


def test_what_the_script_prints_goes_to_the_log(answers: Any) -> None:
    assert "step 0 1.0" in answers["plain"]["printed"]
