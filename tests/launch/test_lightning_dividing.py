"""Plans that divide a model otherwise than its Trainer does, applied in two real processes (gloo, CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("fully_shard is public since torch 2.6", allow_module_level=True)

from two_ranks import trainings  # noqa: E402 - torch has to be there

SCRIPT = "lightning_dividing_script.py"

FREED, ON_HOST = "gathered weights freed after the forward", "weights and optimizer in host memory"
CHANGES = {
    "fsdp1kept+reshard": [["spread", "as written", FREED]],
    "fsdp2kept+reshard,checkpoint": [
        ["spread", "as written", FREED],
        ["checkpointed modules", "none", "blocks.0-1 (Block)"],
    ],
    "fsdp2+offload_parameters": [["spread", "as written", ON_HOST]],
    "ddp+shard": [["spread", "as written", f"FSDP2 in place of DDP, {FREED}"]],
    "ddp+shard,offload_parameters+0.8+clip": [["spread", "as written", f"FSDP2 in place of DDP, {FREED}, {ON_HOST}"]],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results of every case, in the same two processes; ranks that hang fail the tests."""
    return trainings(SCRIPT, out, list(CHANGES), limit=500)


@pytest.mark.parametrize("case", CHANGES)
def test_the_plan_fits_and_trains_what_the_training_as_written_does(results: Any, case: str) -> None:
    for rank in results[case]:
        as_written, planned = rank["report"], rank["fit"]
        assert not as_written["changes"]
        assert planned["changes"] == CHANGES[case], rank["said"]
        assert planned["fits"]
        assert planned["peak"] < planned["before"] == as_written["peak"]
        assert planned["steps"] == as_written["steps"] == 4
        assert planned["logged"] == pytest.approx(as_written["logged"], rel=1e-5)
        before, after = rank["weights"]["report"], rank["weights"]["fit"]
        assert list(after) == list(before)
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)


def test_states_are_divided_or_on_the_host(results: Any) -> None:
    divided, offloaded = results["ddp+shard"][0], results["fsdp2+offload_parameters"][0]
    assert divided["fit"]["states"] == pytest.approx(divided["report"]["states"] / 2, rel=0.01)
    assert offloaded["fit"]["states"] == 0


def test_blocks_of_a_model_that_divides_itself_run_twice(results: Any) -> None:
    rank = results["fsdp2kept+reshard,checkpoint"][0]
    assert rank["report"]["forwards"] == [6] * 5  # four steps, two batches of validation
    assert rank["fit"]["forwards"] == [10, 10, 6, 6, 6]


def test_after_training_the_model_is_whole_again(results: Any) -> None:
    for rank in results["ddp+shard"]:
        assert rank["fit"]["kinds"] == ["Parameter"]
        shapes = [{name: one.shape for name, one in rank["weights"][way].items()} for way in ("report", "fit")]
        assert shapes[0] == shapes[1]


def test_checkpoints_are_those_of_ddp_and_each_goes_on_from_the_others(results: Any, out: Path) -> None:
    paths = (out / "ddp+shard" / way / "last.ckpt" for way in ("report", "fit"))
    as_written, divided = (torch.load(path, weights_only=True) for path in paths)
    assert list(as_written) == list(divided)
    for name, value in as_written["state_dict"].items():
        assert type(divided["state_dict"][name]) is torch.Tensor
        torch.testing.assert_close(divided["state_dict"][name], value)
    (first,), (second,) = as_written["optimizer_states"], divided["optimizer_states"]
    assert first["param_groups"] == second["param_groups"]
    torch.testing.assert_close(second["state"], first["state"])
    for rank in results["ddp+shard"]:
        assert rank["resumed-fit"]["changes"]
        assert rank["resumed-fit"]["steps"] == rank["resumed-report"]["steps"] == 6
        torch.testing.assert_close(rank["weights"]["resumed-fit"], rank["weights"]["resumed-report"])


# --- what is refused ---------------------------------------------------------------------------------------------


def why_not(**settings: Any) -> str:
    import lightning.pytorch as pl

    from vram_guard_lightning import _dividing

    module = pl.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    if settings.pop("buffer", False):
        module.register_buffer("scale", torch.ones(1))
    callbacks, accumulate = settings.pop("callbacks", []), settings.pop("accumulate", 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pl.strategies.DDPStrategy(**settings),
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
    )
    return _dividing.why_not(trainer, module)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({"static_graph": True}, "static_graph=True"),
        ({"ddp_comm_hook": lambda *_: None}, "communication hook"),
        ({"accumulate": 2}, ""),
        ({"accumulate": 2, "buffer": True}, "buffer scale is sent to the ranks once"),
    ],
)
def test_a_model_is_not_divided_where_that_would_be_another_training(settings: dict[str, Any], said: str) -> None:
    found = why_not(**settings)
    assert said in found
    assert bool(found) == bool(said)


def test_callbacks_that_copy_weights_and_unknown_optimizers_are_refused() -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from vram_guard.parallel.in_place_of_ddp import why_not_optimizer

    assert "StochasticWeightAveraging" in why_not(callbacks=[StochasticWeightAveraging(0.1)])
    assert why_not_optimizer({"AdamW", "Adam", "Optimizer", "object"}) == ""
    assert "Lamb" in why_not_optimizer({"Lamb", "Adam", "Optimizer", "object"})
    assert "LBFGS" in why_not_optimizer({"LBFGS", "Optimizer", "object"})
