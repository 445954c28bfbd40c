"""Launches that shard themselves, changed where they do not fit: predicted, refused, and for real over gloo."""

from __future__ import annotations

import json
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

from vram_guard.codec import to_json
from vram_guard.techniques import Recipe
from vram_guard_accelerate._launch_plan import LaunchPlan
from vram_guard_accelerate._sharding_change import ShardingChange

DEPTH = 8
BLOCKS = tuple(f"blocks.{at}" for at in range(DEPTH))
#: Enough for the first of these and not for the second: weights gathered again, and kept.
BETWEEN = "240MiB"
#: Enough for parameters on the host.
LITTLE = "150MiB"
DEEP = ("--depth", DEPTH)
LARGE = ("--batch_size", 1024, "--samples", 4096)
FIRST = ("--version", 1)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = tmp_path_factory.mktemp("changed") / "asked"

    def ask(name: str, loop: str, *more: object, **settings: Any) -> None:
        settings = {"budget": LITTLE, "ranks": 2, **settings}
        cases.request(asked / name, cases.SHARDED, loop, "--out", "never.pt", *more, **settings)

    ask("reshard", "configured", *DEEP, "--strategy", "NO_SHARD", budget=BETWEEN)
    ask("offload", "configured", *DEEP, allow=("offload",))
    ask("shard", "clipping", *DEEP, budget=BETWEEN, allow=("shard",))
    ask("not_named", "clipping", *DEEP, budget=BETWEEN)
    ask("checkpoint", "configured", *LARGE, budget="180MiB", allow=("checkpoint",))
    ask("accumulate", "configured", *LARGE, budget="180MiB", allow=("slices", "accumulate"))
    for name in ("counting", "compressing", "tied"):
        ask(name, name, allow=("shard",))
    ask("first", "configured", *FIRST, "--from_first", budget="1GiB")
    ask("first_checkpoint", "configured", *FIRST, *LARGE, budget="180MiB", allow=("checkpoint",))
    ask("first_keeps", "configured", *FIRST, "--strategy", "SHARD_GRAD_OP", budget="1GiB")
    ask("first_reshard", "configured", *FIRST, *DEEP, "--strategy", "SHARD_GRAD_OP", budget="260MiB")
    ask("first_offload", "configured", *FIRST, "--on_host", budget="1GiB")
    ask("first_hybrid", "configured", *FIRST, "--strategy", "HYBRID_SHARD", budget="1GiB", ranks=4, local_ranks=2)
    return cases.dry_runs(asked)


def changed(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer
    assert answer["fits"], answer["text"]
    return answer["launch_plan"]


@pytest.mark.parametrize(
    ("name", "change", "layout"),
    [
        ("reshard", {"reshard": True}, {}),
        ("offload", {"offload": True}, {"offload": True}),
        ("shard", {"introduced": True, "wrapped": ["Block"]}, {}),
    ],
)
def test_a_change_is_predicted_as_the_same_layout_of_our_own(
    answers: Any, name: str, change: dict[str, Any], layout: dict[str, Any]
) -> None:
    from vram_guard import Parallel
    from vram_guard.simulate import estimate

    ours = estimate(cases.wide_step(DEPTH, parallel=Parallel(gpus=2, kind="fsdp2", blocks=BLOCKS, **layout)), 4)
    plan, found = changed(answers[name]), answers[name]["plan"]["estimate"]
    assert {key: value for key, value in plan["sharding"].items() if value} == change
    # The loop loads a batch while the last one is still held.
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved < answers[name]["plan"]["before"]["peak_reserved"]
    assert any("seen in a dry run of its own" in note for note in answers[name]["notes"])


def test_blocks_are_checkpointed_and_smaller_batches_told_beside_fsdp2(answers: Any) -> None:
    plan = changed(answers["checkpoint"])
    assert set(plan["recipe"]["checkpoint"]) <= set(BLOCKS[:3])
    assert plan["recipe"]["checkpoint"]
    plan = changed(answers["first_checkpoint"])
    assert plan["recipe"]["checkpoint"] == list(BLOCKS[:2])
    told = answers["accumulate"]
    assert (told["fits"], told["changed"]) == (False, False)
    assert told["own_options"] == ["--batch_size", "512", "--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("not_named", "FSDP2 was not tried"),
        ("counting", "buffers or attributes of the model (scale)"),
        ("compressing", "comm_hook"),
        ("tied", "would separate tied weights"),
    ],
)
def test_a_launch_that_fsdp2_would_make_another_training_is_left(answers: Any, name: str, says: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert (answer["fits"], answer["changed"]) == (False, False)
    assert any(says in note for note in answer["notes"]), answer["notes"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("first", {}), ("first_keeps", {"reshard": False}), ("first_offload", {"offload": True})],
)
def test_the_first_version_of_fsdp_is_predicted_as_it_is_configured(
    answers: Any, name: str, settings: dict[str, bool]
) -> None:
    from vram_guard import Parallel
    from vram_guard.simulate import estimate

    layout = Parallel(gpus=2, kind="fsdp1", blocks=BLOCKS[:3], **settings)
    ours, answer = estimate(cases.wide_step(parallel=layout), 4), answers[name]
    assert "error" not in answer, answer
    found = answer["plan"]["before"]
    for category in ("parameters", "gradients", "optimizer_states", "workspace", "buffers"):
        assert found["breakdown"].get(category) == ours.breakdown.get(category), category
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved


def test_the_first_version_of_fsdp_frees_its_weights_by_the_strategy_that_divides_alike(answers: Any) -> None:
    from vram_guard import Parallel
    from vram_guard.simulate import estimate

    ours = estimate(cases.wide_step(DEPTH, parallel=Parallel(gpus=2, kind="fsdp1", blocks=BLOCKS)), 4)
    plan, found = changed(answers["first_reshard"]), answers["first_reshard"]["plan"]
    assert (plan["sharding"]["reshard"], plan["sharding"]["strategy"]) == (True, "FULL_SHARD")
    assert found["estimate"]["peak_reserved"] == ours.peak_reserved < found["before"]["peak_reserved"]


def test_the_hybrid_first_version_divides_a_model_over_the_processes_of_a_machine(answers: Any) -> None:
    """As FSDP1 does on a mesh of machines and their processes, which it is given here."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from vram_guard import Parallel
    from vram_guard.simulate import estimate

    def divided(ranks: int, machines: int) -> Any:
        def apply(model: Any, mesh: Any) -> Any:
            return FullyShardedDataParallel(
                model,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
                device_mesh=mesh,
                device_id=0,
                use_orig_params=True,
            )

        layout = Parallel(gpus=ranks, node=ranks // machines, replicate=machines, apply=apply)
        return estimate(cases.wide_step(parallel=layout), 4)

    ours, answer = divided(4, 2), answers["first_hybrid"]
    assert "error" not in answer, answer
    found = answer["plan"]["before"]
    assert ours.breakdown["parameters"] != divided(8, 2).breakdown["parameters"]
    for category in ("parameters", "gradients", "optimizer_states", "workspace", "buffers"):
        assert found["breakdown"].get(category) == ours.breakdown.get(category), category
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training as written, with DistributedDataParallel. Each process begins with weights of its own."""
    return cases.trained(tmp_path_factory.mktemp("written"), "clipping", "--own_seed", ACCELERATE_USE_CPU="true")


def test_fsdp2_in_place_of_ddp_trains_to_equal_weights(answers: Any, written: Any, tmp_path: Any) -> None:
    """From the weights of the first process, as DistributedDataParallel has it."""
    found = cases.trained(tmp_path, "clipping", "--own_seed", plan=json.dumps(changed(answers["shard"])))
    assert (written["fsdp"], found["fsdp"]) == (False, True)
    assert found["groups"] == [(True, False)] * 3
    assert found["held"] * 2 == pytest.approx(written["held"], rel=0.001)
    assert found["rates"] == written["rates"]
    assert found["losses"] == pytest.approx(written["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(written["norms"], rel=1e-5)
    assert cases.difference(written, found) < 1e-6


def test_selective_checkpointing_under_ddp_trains_to_equal_weights(written: Any, tmp_path: Any) -> None:
    plan = LaunchPlan(recipe=Recipe(checkpoint=BLOCKS[:3], checkpoint_keeps=("addmm",)))
    found = cases.trained(tmp_path, "clipping", "--own_seed", plan=to_json(plan), ACCELERATE_USE_CPU="true")
    assert found["forwards"] == ["Checkpointed"] * 3 != written["forwards"]
    assert found["losses"] == written["losses"]
    assert cases.difference(written, found) < 1e-6


def test_all_changes_of_a_launch_that_shards_itself_train_to_equal_weights(written: Any, tmp_path: Any) -> None:
    """Parameters on the host, gathered twice, blocks checkpointed."""
    plan = LaunchPlan(
        batch_size=4,
        grown_batch_size=4,
        recipe=Recipe(checkpoint=BLOCKS[:2]),
        sharding=ShardingChange(reshard=True, offload=True),
    )
    own = ("configured", "--strategy", "NO_SHARD")
    found = cases.trained(tmp_path, *own, plan=to_json(plan), ACCELERATE_USE_FSDP="true")
    assert found["groups"] == [(True, True)] * 3
    assert [name == "method" for name in found["forwards"]] == [False, False, True]
    assert len(found["losses"]) == len(written["losses"])
    norms = [norm for norm in found["norms"] if norm]
    assert norms == pytest.approx(written["norms"], rel=1e-5)
    assert cases.difference(written, found) < 1e-5


def test_changes_of_a_launch_with_the_first_version_of_fsdp_train_to_equal_weights(written: Any, tmp_path: Any) -> None:
    """Weights gathered twice, blocks checkpointed inside of what FSDP1 wraps."""
    plan = LaunchPlan(
        batch_size=4,
        grown_batch_size=4,
        recipe=Recipe(checkpoint=BLOCKS[:2]),
        sharding=ShardingChange(reshard=True, strategy="FULL_SHARD"),
    )
    own = ("configured", *FIRST, "--strategy", "SHARD_GRAD_OP")
    found = cases.trained(tmp_path, *own, plan=to_json(plan), ACCELERATE_USE_FSDP="true")
    assert found["groups"] == ["FULL_SHARD"] * 3
    assert found["forwards"] == ["Checkpointed", "Checkpointed", "method"]
    assert [norm for norm in found["norms"] if norm] == pytest.approx(written["norms"], rel=1e-5)
    assert cases.difference(written, found) < 1e-5
