"""Scripts under Accelerate's DeepSpeed, predicted on symbolic tensors by DeepSpeed's own engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)

import accelerate_cases as cases
from deepspeed_cases import INSTALLED, engine

from vram_guard import Parallel
from vram_guard.errors import MissingLibraryError
from vram_guard.simulate import estimate

SHARDED = cases.HERE / "accelerate_scripts" / "sharded.py"
ON_HOST = {"device": "cpu"}
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
    small = ("accumulate", "checkpoint", "shard")
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
def test_what_does_not_fit_is_left_as_it_is_launched(answers: Any) -> None:
    answer = answers["tight"]
    assert not answer["fits"]
    assert "DeepSpeed's engine trains the model, and stays as it is launched" in answer["text"] + str(answer["notes"])


@engine
def test_values_that_are_left_to_transformers_are_filled_in(answers: Any) -> None:
    """Stage 3 with the optimizer that the config names, its states on the host: none are on the GPU."""
    for name in ("auto", "all_ranks"):
        assert "error" not in answers[name], answers[name]
        assert answers[name]["plan"]["before"]["breakdown"]["optimizer_states"] == 0
        assert answers[name]["host_memory"]


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
    with pytest.raises(MissingLibraryError, match="pip install deepspeed=="):
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
