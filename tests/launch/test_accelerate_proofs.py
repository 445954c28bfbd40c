"""Plans for a script are used where they leave every value as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases  # noqa: E402 - what is tested has to be there
from accelerate_cases import ONE, TRAINING, difference, launch  # noqa: E402

LOSSES = cases.HERE / "accelerate_scripts" / "losses.py"
WIDE: dict[str, Any] = {"budget": "76MiB", "allow": ("chunked_loss",)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = tmp_path_factory.mktemp("proofs") / "asked"
    sliced = {"budget": "40MiB", "allow": ("slices",)}
    for name in ("Dropping", "Weighted", "Masked", "Queued", "Centred"):
        cases.request(asked / name, LOSSES, name, **sliced)
    cases.request(asked / "Grouped", LOSSES, "Grouped", budget="40MiB", allow=("slices", "offload_activations"))
    cases.request(asked / "Wide", LOSSES, "Wide", **WIDE)
    cases.request(asked / "Wide_running", LOSSES, "Wide", budget="1MiB", allow=("expandable_segments",))
    large = {"budget": "112MiB", "allow": ("checkpoint",)}
    cases.request(asked / "Drawing", LOSSES, "Drawing", "--batch_size", 64, "--samples", 128, **large)
    selective = {"budget": "840MiB", "allow": ("checkpoint", "selective_checkpoint")}
    cases.request(asked / "Heavy", LOSSES, "Heavy", "--batch_size", 64, "--samples", 128, **selective)
    on_host = {"budget": "112MiB", "allow": ("offload_activations",)}
    cases.request(asked / "Spoiling", LOSSES, "Spoiling", "--batch_size", 64, "--samples", 128, **on_host)
    for name in ("adversarial", "diffusion"):
        cases.request(asked / name, TRAINING, name, "--out", "never.pt", budget="36MiB", allow=("slices",))
    return cases.dry_runs(asked)


@pytest.mark.parametrize("name", ["Dropping", "Drawing", "adversarial", "diffusion", "Heavy"])
def test_a_plan_is_used_where_it_is_the_same_for_every_value(answers: Any, name: str) -> None:
    answer = answers[name]
    assert answer["changed"], answer["notes"]


@pytest.mark.parametrize("name", ["Weighted", "Queued", "Centred"])
def test_whatever_is_computed_around_the_body_is_as_written(answers: Any, name: str) -> None:
    assert answers[name]["launch_plan"]["recipe"]["slices"]["body"]["name"] == "network", answers[name]


def test_what_has_no_body_is_refused(answers: Any) -> None:
    reasons = " ".join(answers["Masked"]["plan"]["reasons"])
    assert not answers["Masked"]["changed"]
    assert "no module of it returns a row for each sample" in reasons


def test_what_comes_to_something_else_is_refused_by_name(answers: Any) -> None:
    answer = answers["Spoiling"]
    assert not answer["changed"], answer["notes"]
    (refusal,) = [note for note in answer["notes"] if note.startswith("offload_activations ")]
    assert "nothing is known of the backward pass of" in refusal


def test_a_script_that_takes_no_other_batch_size_is_planned_for_at_its_own(answers: Any) -> None:
    answer = answers["Grouped"]
    assert "error" not in answer, answer
    assert answer["plan"]["before"]["peak_reserved"] > 40 * 2**20
    (refusal,) = [said for said in answer["plan"]["reasons"] if said.startswith("slices of the batch are not")]
    assert "with batches of 2 samples, the script fails: RuntimeError: shape '[-1, 4, 10]' is invalid" in refusal
    assert "losses.py, line" in refusal


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


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
