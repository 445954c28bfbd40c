"""Plans that divide a runner's model otherwise than as written, applied in two real processes (gloo, CPU)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mmengine")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("fully_shard is public since torch 2.6", allow_module_level=True)

from two_ranks import trainings  # noqa: E402 - torch has to be there

SCRIPT = "mmengine_dividing_script.py"

FREED = "gathered weights freed after the forward"
CHANGES = {
    "ddp+shard": [["spread", "as written", f"FSDP2 in place of DDP, {FREED}"]],
    "ddp+checkpoint": [["checkpointed modules", "none", "layers.0-1 (Residual)"]],
    "fsdpkept+reshard": [["spread", "as written", FREED]],
    "fsdp+checkpoint": [["checkpointed modules", "none", "layers.0-1 (Residual)"]],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results of every case, in the same two processes; ranks that hang fail the tests."""
    return trainings(SCRIPT, tmp_path_factory.mktemp("ranks"), list(CHANGES), limit=500, libraries=("mmengine.runner",))


@pytest.mark.parametrize("case", CHANGES)
def test_the_plan_fits_and_trains_what_the_training_as_written_does(results: Any, case: str) -> None:
    for rank in results[case]:
        as_written, planned = rank["report"], rank["fit"]
        assert not as_written["changes"]
        assert planned["changes"] == CHANGES[case]
        assert planned["fits"]
        assert planned["peak"] < planned["before"] == as_written["peak"]
        assert planned["losses"] == pytest.approx(as_written["losses"], rel=1e-4)
        before, after = rank["weights"]["report"], rank["weights"]["fit"]
        assert list(after) == list(before)
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["ddp+checkpoint", "fsdp+checkpoint"])
def test_blocks_are_checkpointed_under_ddp_and_inside_fsdps_modules(results: Any, case: str) -> None:
    for rank in results[case]:
        assert rank["report"]["training"]["checkpointed"] == [False] * 4
        assert rank["fit"]["training"]["checkpointed"] == [True, True, False, False]


def test_the_optimizer_updates_shards_and_checkpoints_are_whole(results: Any) -> None:
    for rank in results["ddp+shard"]:
        assert rank["report"]["training"]["kinds"] == ["Parameter"]
        assert rank["fit"]["training"]["kinds"] == ["DTensor"]
        assert rank["fit"]["kinds"] == ["Parameter"]  # after training
    paths = [results["ddp+shard"][0][way]["checkpoint"] for way in ("report", "fit")]
    as_written, divided = (torch.load(path, weights_only=False) for path in paths)
    torch.testing.assert_close(dict(divided["state_dict"]), dict(as_written["state_dict"]), rtol=1e-5, atol=1e-6)
    first, second = as_written["optimizer"], divided["optimizer"]
    assert first["param_groups"] == second["param_groups"]
    torch.testing.assert_close(second["state"], first["state"], rtol=1e-4, atol=1e-5)
