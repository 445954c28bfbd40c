"""Plans for a script are used where the loss graph or a word allows them."""

from __future__ import annotations

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
from accelerate_cases import ONE, TRAINER, TRAINING, difference, launch  # noqa: E402

from vram_guard.apply.normalisers import Normaliser  # noqa: E402
from vram_guard.codec import from_json, to_json  # noqa: E402
from vram_guard_accelerate._launch_plan import LaunchPlan  # noqa: E402

LOSSES = cases.HERE / "accelerate_scripts" / "losses.py"
SEGMENTATION = cases.HERE / "accelerate_scripts" / "segmentation.py"
BY_GRAPH = "slices of a batch: proven by the loss graph"
WIDE: dict[str, Any] = {"budget": "76MiB", "allow": ("chunked_loss",)}
AS_SAID = "slices of a batch: as you said (--loss-weight mean)"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    folder = tmp_path_factory.mktemp("proofs")
    asked = folder / "asked"
    sliced = {"budget": "40MiB", "allow": ("accumulate",)}
    for name in ("Plain", "Dropping", "Contrastive", "Weighted", "Ignoring", "Masked", "Counting", "Queued", "Centred"):
        cases.request(asked / name, LOSSES, name, **sliced)
    cases.request(asked / "segmentation", SEGMENTATION, budget="26MiB", allow=("accumulate",))
    cases.request(asked / "Grouped", LOSSES, "Grouped", budget="40MiB", allow=("accumulate", "offload_activations"))
    cases.request(asked / "Wide", LOSSES, "Wide", **WIDE)
    cases.request(asked / "Wide_running", LOSSES, "Wide", budget="1MiB", allow=("expandable_segments",))
    cases.request(asked / "Contrastive_said", LOSSES, "Contrastive", **sliced, loss_weight="mean")
    large = {"budget": "112MiB", "allow": ("checkpoint",)}
    for name in ("Drawing", "Unhindered"):
        cases.request(asked / name, LOSSES, name, "--batch_size", 64, "--samples", 128, **large)
    selective = {"budget": "840MiB", "allow": ("checkpoint", "selective_checkpoint")}
    cases.request(asked / "Heavy", LOSSES, "Heavy", "--batch_size", 64, "--samples", 128, **selective)
    on_host = {"budget": "112MiB", "allow": ("offload_activations",)}
    for name in ("Spoiling", "Unhindered"):
        cases.request(asked / f"{name}_waiting", LOSSES, name, "--batch_size", 64, "--samples", 128, **on_host)
    for name in ("adversarial", "diffusion"):
        cases.request(asked / name, TRAINING, name, "--out", "never.pt", budget="24MiB", allow=("accumulate",))
    own = ("--output_dir", folder, "--report_to", "none", "--per_device_train_batch_size", 16, "--out", "never.pt")
    cases.request(asked / "trainer", TRAINER, *own, budget="80MiB", allow=("accumulate",))
    return cases.dry_runs(asked)


@pytest.mark.parametrize(
    "name",
    [
        *("Plain", "Dropping", "Drawing", "adversarial", "diffusion", "trainer", "Unhindered", "Unhindered_waiting"),
        "Heavy",
    ],
)
def test_a_plan_is_used_where_it_is_the_same_for_every_value(answers: Any, name: str) -> None:
    answer = answers[name]
    assert answer["changed"], answer["notes"]


WEIGHED = {
    "Ignoring": "the number of values other than 0 in batch['labels']",
    "Masked": "the sum of batch['0']['mask']",
    "Weighted": "the class weights (buffer classes) of the labels other than -100 in batch['labels']",
    "segmentation": "the number of values other than 255 in batch['labels']",
}


@pytest.mark.parametrize(("name", "count"), WEIGHED.items())
def test_slices_are_weighed_by_what_the_loss_is_divided_by(answers: Any, name: str, count: str) -> None:
    answer = answers[name]
    assert answer["launch_plan"]["micro_batch_size"] < 16, answer["notes"]
    assert any(note.startswith(BY_GRAPH) for note in answer["notes"]), answer["notes"]
    assert f"the losses of micro-batches are weighted by {count}" in answer["notes"]


@pytest.mark.parametrize(
    ("name", "technique", "named"),
    [
        pytest.param(
            "Contrastive", "smaller micro-batches", "joins samples of the batch", marks=pytest.mark.torch_since(2, 6)
        ),
        ("Centred", "smaller micro-batches", "aten.sub"),
        ("Counting", "smaller micro-batches", "keeps: calls"),
        ("Queued", "smaller micro-batches", "it adds means over different counts of the batch"),
        ("Spoiling_waiting", "offload_activations", "nothing is known of the backward pass of"),
    ],
)
def test_what_comes_to_something_else_is_refused_by_name(answers: Any, name: str, technique: str, named: str) -> None:
    answer = answers[name]
    assert not answer["changed"], answer["notes"]
    (refusal,) = [note for note in answer["notes"] if note.startswith(f"{technique} ")]
    assert "not possible here" in refusal
    assert named in refusal


def test_a_script_that_takes_no_other_batch_size_is_planned_for_at_its_own(answers: Any) -> None:
    answer = answers["Grouped"]
    assert "error" not in answer, answer
    assert answer["plan"]["before"]["peak_reserved"] > 40 * 2**20
    (refusal,) = [note for note in answer["notes"] if note.startswith("smaller micro-batches ")]
    assert "with batches of 2 samples, the script fails: RuntimeError: shape '[-1, 4, 10]' is invalid" in refusal
    assert "losses.py, line" in refusal


def test_what_is_not_proven_is_not_cut(answers: Any) -> None:
    refusals = [note for note in answers["Counting"]["notes"] if "micro-batches are not possible" in note]
    assert "state that the model keeps: calls" in refusals[0]
    assert "--loss-weight" in refusals[0]
    assert answers["Counting"]["plan"]["reasons"][0].startswith("It would fit with 2 micro-batches of 8, but")


@pytest.mark.torch_since(2, 6)
def test_products_are_kept_where_that_saves_time(answers: Any) -> None:
    recipe = answers["Heavy"]["launch_plan"]["recipe"]
    assert recipe["checkpoint"]
    assert recipe["checkpoint_keeps"] == ["addmm"]


@pytest.mark.torch_since(2, 6)
def test_a_loss_in_chunks_is_used_where_it_is_allowed(answers: Any) -> None:
    answer = answers["Wide"]
    assert answer["launch_plan"]["recipe"]["chunked_head"] == "head", answer["notes"]


def test_expandable_segments_are_proposed_where_the_process_runs_already(answers: Any) -> None:
    notes = answers["Wide_running"]["notes"]
    assert any("start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in note for note in notes), notes


@pytest.mark.torch_since(2, 6)
def test_a_launch_computes_its_loss_in_chunks_and_expands_its_segments(tmp_path: Path, cache: Path) -> None:
    own = ("Wide", "--batch_size", 64, "--samples", 128)
    written, changed = tmp_path / "written.pt", tmp_path / "changed.pt"
    plain = launch(*ONE, LOSSES, *own, "--out", written, cache=cache, guarded=False)
    options = ("--budget", "161MiB", "--margin", "0", "--allow", "chunked_loss,expandable_segments")
    guarded = launch(*ONE, *options, LOSSES, *own, "--out", changed, cache=cache)
    assert (plain.returncode, guarded.returncode) == (0, 0), guarded.stderr
    print(guarded.stderr)
    one, other = torch.load(written), torch.load(changed)
    assert difference(one, other) < 1e-6
    assert (one["allocator"], other["allocator"]) == ("", "expandable_segments:True")


def test_what_the_user_says_is_done_and_said(answers: Any) -> None:
    answer = answers["Contrastive_said"]
    assert answer["launch_plan"]["micro_batch_size"] == 8
    assert AS_SAID in answer["notes"]


def test_what_the_loss_is_divided_by_travels_with_the_plan() -> None:
    count = Normaliser(("0", "items", 1), ignored=255, shifted=True, weights="criterion.weight")
    plan = LaunchPlan(micro_batch_size=4, loss_weight=count)
    assert from_json(LaunchPlan, to_json(plan)) == plan
    assert from_json(LaunchPlan, to_json(replace(plan, loss_weight="sum"))).loss_weight == "sum"
    assert from_json(LaunchPlan, '{"micro_batch_size": 4, "loss_weight": "mean"}').loss_weight == "mean"  # of before


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_launch_whose_plan_is_refuted_starts_nothing_and_trains_as_written_under_another(
    tmp_path: Path, cache: Path
) -> None:
    own = ("Counting", "--batch_size", 64, "--samples", 160)
    options = ("--budget", "112MiB", "--margin", "0")
    written, sliced, other = (tmp_path / f"{name}.pt" for name in ("written", "sliced", "other"))
    plain = launch(*ONE, LOSSES, *own, "--out", written, cache=cache, guarded=False)
    refuted = launch(*ONE, *options, "--allow", "accumulate", LOSSES, *own, "--out", sliced, cache=cache)
    guarded = launch(*ONE, *options, "--allow", "accumulate,checkpoint", LOSSES, *own, "--out", other, cache=cache)
    assert (plain.returncode, refuted.returncode, guarded.returncode) == (0, 1, 0), guarded.stderr
    assert "keeps: calls" in " ".join(refuted.stderr.split())
    assert not sliced.exists()
    assert difference(torch.load(written), torch.load(other)) < 1e-6


@pytest.mark.parametrize(
    ("name", "script", "budget"),
    [
        ("Ignoring", (LOSSES, "Ignoring"), "24MiB"),  # of some slices, no label counts
        ("Masked", (LOSSES, "Masked"), "40MiB"),
        ("segmentation", (SEGMENTATION,), "26MiB"),
    ],
)
def test_a_launch_that_weighs_its_slices_is_the_same_training(
    tmp_path: Path, cache: Path, name: str, script: tuple[Any, ...], budget: str
) -> None:
    written, sliced = tmp_path / "written.pt", tmp_path / "sliced.pt"
    plain = launch(*ONE, *script, "--out", written, cache=cache, guarded=False)
    options = ("--budget", budget, "--margin", "0", "--allow", "accumulate")
    guarded = launch(*ONE, *options, *script, "--out", sliced, cache=cache)
    assert (plain.returncode, guarded.returncode) == (0, 0), guarded.stderr
    assert f"the losses of micro-batches are weighted by {WEIGHED[name]}" in guarded.stderr
    one, other = torch.load(written), torch.load(sliced)
    assert difference(one, other) < 1e-5
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
