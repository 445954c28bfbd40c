"""Scripts under Accelerate's DeepSpeed, predicted on symbolic tensors by DeepSpeed's own engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from deepspeed_cases import INSTALLED, engine

from vram_guard import Parallel
from vram_guard.codec import to_json
from vram_guard.errors import MissingLibraryError
from vram_guard.simulate import estimate
from vram_guard.techniques import Recipe
from vram_guard_accelerate.launch_plan import LaunchPlan

SHARDED = cases.HERE / "accelerate_scripts" / "sharded.py"
ON_HOST = {"device": "cpu"}
SMALL = 20_000
#: Less than the activations of a batch of 1024 take.
LITTLE = "175MiB"
AUTO = {
    "zero_optimization": {"stage": 3, "offload_optimizer": ON_HOST, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    if not INSTALLED:
        pytest.skip("deepspeed is not installed")
    asked = tmp_path_factory.mktemp("deepspeed") / "asked"
    for ranks in (2, 8):
        cases.request(asked / f"stage2_{ranks}", SHARDED, "clipping", "--out", "never.pt", ranks=ranks, allow=())
    cases.request(asked / "two_models", SHARDED, "two_models", "--out", "never.pt", ranks=2)
    small = ("accumulate", "checkpoint")
    cases.request(asked / "tight", SHARDED, "clipping", "--out", "never.pt", ranks=2, budget="20MiB", allow=small)
    trainer = (cases.TRAINER, "--output_dir", asked.parent / "trainer", "--out", "never.pt", "--report_to", "none")
    configs = {
        "auto": AUTO,
        "nvme": {**AUTO, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
        "all_ranks": {**AUTO, "train_batch_size": 16},  # of both ranks: Transformers compares it with its own
        "left_open": {**AUTO, "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
    }
    for name, config in configs.items():
        path = asked.parent / f"{name}.json"
        path.write_text(json.dumps(config))
        cases.request(asked / name, *trainer, "--deepspeed", path, ranks=2, allow=())
    return cases.dry_runs(asked, ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="2")


@engine
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_launch_with_deepspeed_is_predicted_as_the_same_step_is(answers: Any, ranks: int) -> None:
    answer = answers[f"stage2_{ranks}"]
    assert "error" not in answer, answer
    found = answer["plan"]["before"]
    step = cases.wide_step(parallel=Parallel(gpus=ranks, kind="deepspeed2"))
    mine = estimate(step.with_(clip_grad_norm=None), 4)
    assert found["breakdown"]["parameters"] == mine.breakdown["parameters"]
    assert found["breakdown"]["optimizer_states"] == pytest.approx(mine.breakdown["optimizer_states"], abs=2048)
    assert found["peak_reserved"] == mine.peak_reserved
    # The loop loads a batch while the last one is still held.
    assert found["peak_allocated"] == pytest.approx(mine.peak_allocated, abs=2048)


@engine
def test_what_the_engine_leaves_no_room_for_does_not_fit(answers: Any) -> None:
    """And nothing else helps here: the engine's own buckets alone take more than that."""
    answer = answers["tight"]
    assert (answer["fits"], answer["changed"]) == (False, False)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Plans for a training whose activations take most, one technique each."""
    if not INSTALLED:
        pytest.skip("deepspeed is not installed")
    asked = tmp_path_factory.mktemp("changed") / "asked"
    large = ("in_batches", "--out", "never.pt", "--batch_size", 1024, "--samples", 4096)
    for name in ("checkpoint", "accumulate"):
        cases.request(asked / name, SHARDED, *large, ranks=2, budget=LITTLE, allow=(name,))
    config = by_engine(asked.parent, 2)
    own = ("--output_dir", asked.parent / "trainer", "--out", "never.pt", "--report_to", "none")
    trainer = (*own, "--deepspeed", config["ACCELERATE_DEEPSPEED_CONFIG_FILE"], "--per_device_train_batch_size", 64)
    for name in ("checkpoint", "accumulate"):
        cases.request(asked / f"trainer_{name}", cases.TRAINER, *trainer, "--samples", 128, ranks=2, budget=LITTLE,
                      allow=(name,))  # fmt: skip
    return cases.dry_runs(asked, **config)


def by_engine(folder: Path, stage: int, *, whole: int = 0, group: int = 0, **settings: float) -> dict[str, str]:
    """Variables of a launch by a config whose buckets are smaller than the model, as those of large models are.

    ``whole``: weights of no more elements stay whole under stage 3; 0: as DeepSpeed has it, 100,000. ``group``: of how
    many elements the optimizer updates at once under stage 3; 0: as DeepSpeed has it, 1e9.
    """
    sizes = dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"), SMALL)
    more = {"stage": stage, "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": True}
    more |= {"stage3_param_persistence_threshold": whole} if whole else {}
    more |= {"sub_group_size": group} if group else {}
    counted = dict.fromkeys((name for name in AUTO if "batch" in name or "steps" in name), "auto")
    path = folder / f"small{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {**sizes, **more}, **counted, **settings}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


@engine
def test_blocks_are_checkpointed_and_smaller_batches_are_told_where_it_does_not_fit(changed: Any) -> None:
    for name in ("checkpoint", "trainer_checkpoint"):
        answer = changed[name]
        assert answer["fits"], answer
        assert answer["plan"]["estimate"]["peak_reserved"] < answer["plan"]["before"]["peak_reserved"]
        assert any("4 samples" in note for note in answer["notes"]), answer["notes"]
        assert answer["launch_plan"]["recipe"]["checkpoint"]
    for name, option, size in (
        ("accumulate", "--batch_size", "512"),
        ("trainer_accumulate", "--per_device_train_batch_size", "32"),
    ):
        answer = changed[name]
        assert (answer["fits"], answer["changed"]) == (False, False), answer
        assert answer["own_options"] == [option, size, "--gradient_accumulation_steps", "2"]


def launched(folder: Path, *options: object, **config: int) -> tuple[dict[str, Any], str]:
    """What two processes over gloo have come to under ``vram-guard launch``, and what it said."""
    file = by_engine(folder, 2, **config)["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    given = ("--margin", "0", "--use_deepspeed", "--deepspeed_config_file", file, "--num_processes", "2", *cases.QUIET)
    done = cases.launch(*given, *options, "--out", folder / "out.pt", cache=folder, timeout=900, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "out.pt")
    assert found["processes"] == 2
    return found, " ".join(done.stderr.split())


@engine
def test_a_real_launch_with_deepspeed_is_predicted_changed_and_trains(tmp_path: Path) -> None:
    large = (SHARDED, "in_batches", "--batch_size", 1024, "--samples", 4096)
    found, _said = launched(tmp_path, "--budget", LITTLE, *large)
    assert "Checkpointed" in found["forwards"]


@engine
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_under_the_engine_train_to_equal_weights(stage: int, tmp_path: Path) -> None:
    """Blocks checkpointed."""
    plan = LaunchPlan(batch_size=4, grown_batch_size=4, recipe=Recipe(checkpoint=("blocks.0", "blocks.1")))
    variables = {**by_engine(tmp_path, stage), "DS_ACCELERATOR": "cpu"}
    written, found = (cases.trained(tmp_path, "in_batches", plan=one, **variables) for one in ("", to_json(plan)))
    assert (written["forwards"], found["forwards"]) == (["method"] * 3, ["Checkpointed", "Checkpointed", "method"])
    assert len(found["losses"]) == len(written["losses"])
    assert cases.difference(written, found) < 1e-5


@engine
def test_a_trainer_in_two_processes_under_the_engine_trains_to_equal_weights(tmp_path: Path) -> None:
    """Blocks checkpointed."""
    plan = LaunchPlan(
        batch_size=4,
        grown_batch_size=4,
        recipe=Recipe(checkpoint=("transformer.h.0", "transformer.h.1")),
    )
    variables = {**by_engine(tmp_path, 2, whole=1000), "DS_ACCELERATOR": "cpu"}
    words = {"output_dir": tmp_path / "trainer", "deepspeed": variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"],
             "report_to": "none", "save_strategy": "no", "num_train_epochs": 1, "learning_rate": 1e-3,
             "adam_epsilon": 1e-4, "per_device_train_batch_size": 4}  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", value)]
    written, found = (
        cases.trained(tmp_path, *given, script=cases.TRAINER, plan=one, libraries=cases.TRAINER_LIBRARIES, **variables)
        for one in ("", to_json(plan))
    )
    assert (written["forwards"], found["forwards"]) == (["method"] * 4, ["Checkpointed"] * 2 + ["method"] * 2)
    assert written["steps"] == found["steps"] == 2
    assert (written["zero"], found["zero"]) == ((2, False, "AdamW"),) * 2
    assert cases.difference(written, found) < 1e-5


@engine
def test_values_that_are_left_to_transformers_are_filled_in(answers: Any) -> None:
    """Stage 3 with the optimizer that the config names, its states on the host: none are on the GPU."""
    for name in ("auto", "all_ranks"):
        assert "error" not in answers[name], answers[name]
        assert answers[name]["plan"]["before"]["breakdown"]["optimizer_states"] == 0


@engine
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvme", "DeepSpeed's offload_param to nvme"),
        ("left_open", "zero_optimization.allgather_bucket_size"),
        ("two_models", "DeepSpeed is followed with one model"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(answers: Any, name: str, words: str) -> None:
    assert words in answers[name]["message"], answers[name]


def test_the_rank_that_deepspeeds_engine_is_made_as_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's state is asked for again while the engine is made."""
    from vram_guard_accelerate.dry_run import own_ranks

    own_ranks.take_back.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    own_ranks.take_back()
    assert "LOCAL_RANK" not in os.environ
    monkeypatch.setenv("LOCAL_RANK", "0")
    own_ranks.take_back()
    assert os.environ["LOCAL_RANK"] == "0"
    own_ranks.take_back.cache_clear()


def test_without_deepspeed_a_launch_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    from vram_guard_accelerate.cli.arguments import parsed
    from vram_guard_accelerate.cli.target import target_of

    find = importlib.util.find_spec
    script = tmp_path / "script.py"
    script.touch()
    given = parsed(["--use_deepspeed", "--num_processes", "2", str(script)])
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else find(name, *rest)
    )
    with pytest.raises(MissingLibraryError, match="deepspeed=="):
        target_of(given)


@engine
def test_options_of_a_launch_reach_the_script_as_accelerate_has_it(tmp_path: Path) -> None:
    from vram_guard_accelerate.cli.arguments import parsed
    from vram_guard_accelerate.cli.target import target_of

    script = tmp_path / "script.py"
    script.touch()
    options = ("--use_deepspeed", "--num_processes", "4", "--zero_stage", "3", "--offload_optimizer_device", "cpu")
    target = target_of(parsed([*options, str(script)]))
    assert (target.ranks, target.simple) == (4, False)
    assert target.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert target.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert target.environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
