"""Launches that divide their model by Accelerate's FSDP: predicted as they are configured, and trained over gloo."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("FSDP2 is public since torch 2.6", allow_module_level=True)

import accelerate_cases as cases

from vram_guard import Parallel
from vram_guard.codec import to_json
from vram_guard.simulate import estimate
from vram_guard.techniques import Recipe
from vram_guard_accelerate.launch_plan import LaunchPlan

SHARDED = cases.SHARDED
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CATEGORIES = ("parameters", "gradients", "optimizer_states", "workspace", "buffers")
LARGE = ("--batch_size", 1024, "--samples", 4096)
FIRST = ("--version", 1)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = tmp_path_factory.mktemp("sharded") / "asked"

    def ask(name: str, *more: object, loop: str = "configured", **settings: Any) -> None:
        settings = {"budget": "1GiB", "ranks": 2, "whole_job": False, **settings}
        cases.request(asked / name, SHARDED, loop, "--out", "never.pt", *more, **settings)

    for ranks in (2, 8):
        ask(f"second_{ranks}", ranks=ranks)
    ask("second_on_host", "--on_host")
    ask("second_keeps", "--strategy", "NO_SHARD")
    ask("first", *FIRST, "--from_first")
    ask("first_keeps", *FIRST, "--strategy", "SHARD_GRAD_OP")
    ask("first_on_host", *FIRST, "--on_host")
    ask("first_hybrid", *FIRST, "--strategy", "HYBRID_SHARD", ranks=4, local_ranks=2)
    ask("checkpoint", *LARGE, budget="180MiB", allow=("checkpoint",))
    ask("first_checkpoint", *FIRST, *LARGE, budget="180MiB", allow=("checkpoint",))
    ask("accumulate", *LARGE, budget="180MiB", allow=("slices", "accumulate"))
    ask("listed", "--listed")
    ask("asks", loop="clipping", budget="90MiB", allow=("offload_parameters", "shard"))
    trainer = (cases.TRAINER, "--output_dir", asked.parent / "flag", "--out", "never.pt", "--report_to", "none")
    sharded = '{"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "cpu_ram_efficient_loading": false}'
    cases.request(asked / "whole", *trainer, ranks=2, allow=("slices",))
    flags = ("--fsdp", "full_shard auto_wrap", "--fsdp_config", sharded)
    cases.request(asked / "flag", *trainer, *flags, ranks=2, allow=("slices",))
    return cases.dry_runs(asked)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("second_2", {"kind": "fsdp2"}),
        ("second_8", {"kind": "fsdp2", "gpus": 8}),
        ("second_on_host", {"kind": "fsdp2", "offload": True}),
        ("second_keeps", {"kind": "fsdp2", "reshard": False}),
        ("first", {"kind": "fsdp1"}),
        ("first_keeps", {"kind": "fsdp1", "reshard": False}),
        ("first_on_host", {"kind": "fsdp1", "offload": True}),
    ],
)
def test_a_launch_is_predicted_as_the_same_layout_of_our_own(answers: Any, name: str, layout: dict[str, Any]) -> None:
    """Accelerate's functions over pretended processes, and ours on the same blocks, allocate the same."""
    ours = estimate(cases.wide_step(parallel=Parallel(**{"gpus": 2, "blocks": BLOCKS, **layout})), 4)
    assert_alike(answers[name], ours)


def test_the_hybrid_first_version_divides_a_model_over_the_processes_of_a_machine(answers: Any) -> None:
    """As FSDP1 does on a mesh of machines and their processes, which it is given here."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def apply(model: Any, mesh: Any) -> Any:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            device_mesh=mesh,
            device_id=0,
            use_orig_params=True,
        )

    layout = Parallel(gpus=4, node=2, replicate=2, apply=apply)
    assert_alike(answers["first_hybrid"], estimate(cases.wide_step(parallel=layout), 4))


def assert_alike(answer: dict[str, Any], ours: Any) -> None:
    assert "error" not in answer, answer
    assert not answer["changed"]
    found = answer["plan"]["before"]
    for category in CATEGORIES:
        assert found["breakdown"].get(category) == ours.breakdown.get(category), category
    # The loop loads a batch while the last one is still held.
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved


def test_blocks_are_checkpointed_and_smaller_batches_told_where_a_model_is_divided(answers: Any) -> None:
    for name in ("checkpoint", "first_checkpoint"):
        assert answers[name]["fits"], answers[name]
        named = answers[name]["launch_plan"]["recipe"]["checkpoint"]
        assert named
        assert set(named) <= set(BLOCKS)
    told = answers["accumulate"]
    assert (told["fits"], told["changed"]) == (False, False)
    assert told["own_options"] == ["--batch_size", "512", "--gradient_accumulation_steps", "2"]


def test_weights_that_were_listed_before_they_are_divided_would_not_be_clipped(answers: Any) -> None:
    assert "before Accelerator.prepare" in answers["listed"]["message"]


def test_another_division_is_left_to_accelerates_own_options(answers: Any) -> None:
    answer = answers["asks"]
    assert (answer["fits"], answer["changed"]) == (False, False)
    assert sum("--fsdp_offload_params true" in note for note in answer["notes"]) == 3, "both techniques, and a hint"


def test_trainers_own_flag_is_followed(answers: Any) -> None:
    """``--fsdp``, which the Trainer refuses in a process that is alone."""
    whole, sharded = (answers[name] for name in ("whole", "flag"))
    assert "error" not in sharded, sharded
    found, all_of_it = (one["plan"]["before"]["breakdown"]["optimizer_states"] for one in (sharded, whole))
    # Two moments of each weight, in blocks of 512 bytes.
    assert 0.5 * all_of_it < found < 0.75 * all_of_it


# --- for real ---------------------------------------------------------------------------------------------------------


def test_a_real_launch_with_fsdp2_is_predicted_changed_and_trains(tmp_path: Any) -> None:
    """Two processes over gloo, which the options of the launch divide."""
    divided = (
        *("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false", "--num_processes", "2"),
        *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"),
        *("--fsdp_state_dict_type", "FULL_STATE_DICT", *cases.QUIET),
    )
    allowed = ("--budget", "180MiB", "--margin", "0", "--allow", "checkpoint")
    done = cases.launch(*allowed, *divided, SHARDED, "clipping", *LARGE, "--out", tmp_path / "out.pt", cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "out.pt")
    assert (found["fsdp"], found["processes"], found["kinds"]) == (True, 2, ["DTensor"])
    assert "Checkpointed" in found["forwards"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training as written, with DistributedDataParallel. Each process begins with weights of its own."""
    return cases.trained(tmp_path_factory.mktemp("written"), "clipping", "--own_seed", ACCELERATE_USE_CPU="true")


def test_selective_checkpointing_under_ddp_trains_to_equal_weights(written: Any, tmp_path: Any) -> None:
    plan = LaunchPlan(recipe=Recipe(checkpoint=BLOCKS, checkpoint_keeps=("addmm",)))
    found = cases.trained(tmp_path, "clipping", "--own_seed", plan=to_json(plan), ACCELERATE_USE_CPU="true")
    assert found["forwards"] == ["Checkpointed"] * 3 != written["forwards"]
    assert found["losses"] == written["losses"]
    assert cases.difference(written, found) < 1e-6


@pytest.mark.parametrize("version", [1, 2])
def test_checkpointed_blocks_of_a_divided_model_train_to_equal_weights(
    written: Any, version: int, tmp_path: Any
) -> None:
    """Inside of what FSDP1 wraps."""
    plan = LaunchPlan(recipe=Recipe(checkpoint=BLOCKS[:2]))
    own = ("configured", "--version", version)
    found = cases.trained(tmp_path, *own, plan=to_json(plan), ACCELERATE_USE_FSDP="true")
    assert [name == "Checkpointed" for name in found["forwards"]] == [True, True, False]
    assert [norm for norm in found["norms"] if norm] == pytest.approx(written["norms"], rel=1e-5)
    assert cases.difference(written, found) < 1e-5
