"""FSDPStrategy and ModelParallelStrategy: one rank predicted, and plans applied in two real processes (gloo, CPU)."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("fully_shard is public since torch 2.6", allow_module_level=True)

from two_ranks import trainings  # noqa: E402 - torch has to be there

SCRIPT = "lightning_sharded_script.py"

#: Guarded trainings in micro-batches, and those without the guard that they must be equal to.
EQUAL = {
    "fsdp+split": "fsdp+plain",
    "sharded+split": "sharded+plain",
    "tensor+split": "tensor+plain",
}
#: Its blocks checkpointed, inside FSDP's modules.
CHECKPOINTED = "fsdp+checkpoint"
UNEVEN = ("fsdp+uneven+split", "fsdp+uneven+plain")
SAVED = ("sharded+saved", "tensor+saved", "fsdp+saved")
TESTED = ("fsdp+tested", "sharded+tested")
OTHERS = (CHECKPOINTED, *UNEVEN, *SAVED, *TESTED, "meta", "wrapped", "fsdp+poor", "sharded+dies")

#: Of the module that is trained, and what AdamW keeps of each.
WEIGHTS = 4 * (6 * 64 + 64 + 3 * (2 * 64 * 256 + 256 + 64) + 64 * 2 + 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results of every training, in the same two processes; ranks that hang fail the tests."""
    out = tmp_path_factory.mktemp("ranks")
    cases = [*EQUAL, *EQUAL.values(), *OTHERS]
    return trainings(SCRIPT, out, cases, limit=280)


@pytest.mark.parametrize("case", EQUAL)
def test_a_plan_in_two_processes_trains_what_the_training_as_written_does(results: Any, case: str) -> None:
    for mine, plain in zip(results[case], results[EQUAL[case]], strict=True):
        assert "error" not in mine, mine["error"]
        assert mine["splits"] == 4, mine["said"]
        assert mine["steps"] == plain["steps"]
        assert plain["seen"] == [32] * plain["steps"]
        assert mine["seen"] == [8] * 4 * plain["steps"]
        assert mine["logged"] == pytest.approx(plain["logged"], rel=1e-5)
        assert list(mine["weights"]) == list(plain["weights"])
        for name, value in plain["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=2e-5, atol=2e-6)


def test_ranks_with_batches_of_other_sizes_run_as_many_forwards(results: Any) -> None:
    """Each of which gathers the weights of all: a rank that ran one more would wait for ever."""
    split, plain = (results[case] for case in UNEVEN)
    assert [rank["seen"] for rank in plain] == [[8, 8, 8, 8], [3, 4, 8, 1]]
    assert split[0]["seen"] == [4, 4, 4, 4, 4, 4, 8]
    assert split[1]["seen"] == [2, 1, 2, 2, 4, 4, 1]
    for mine, as_written in zip(split, plain, strict=True):
        for name, value in as_written["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=1e-4, atol=1e-5)


def test_blocks_are_checkpointed_before_the_strategy_divides_them(results: Any) -> None:
    for mine, plain in zip(results[CHECKPOINTED], results["fsdp+plain"], strict=True):
        assert "error" not in mine, mine["error"]
        assert len(mine["checkpointed"]) == 2, mine["said"]
        assert mine["forwards"] == [4, 4, 2]  # of two steps; those of checkpointed blocks run twice
        assert plain["forwards"] == [2, 2, 2]
        for name, value in plain["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["fsdp+split", "wrapped", "sharded+split", "meta"])
def test_states_of_one_rank_are_half_of_the_models(results: Any, case: str) -> None:
    first, second = results[case]
    assert "error" not in first, first["error"]
    assert first["layout"] == {"gpus": 2, "tensor": 1}
    assert first["reserved"] == second["reserved"]
    # Two moments of each weight; blocks of 512 bytes, flat parameters padded to the number of ranks.
    assert first["breakdown"]["optimizer_states"] == pytest.approx(WEIGHTS, rel=0.03)


def test_ranks_of_tensor_parallelism_share_the_data_and_the_cut_layers(results: Any) -> None:
    first, _second = results["tensor+split"]
    assert first["layout"] == {"gpus": 2, "tensor": 2}
    whole = 4 * (6 * 64 + 64 + 64 * 2 + 2 + 3 * 64)
    cut = 3 * 4 * (2 * 64 * 256 + 256) // 2
    assert first["breakdown"]["optimizer_states"] == pytest.approx(2 * (whole + cut), rel=0.05)
    assert "tensor" in first["dimensions"]
    assert first["steps"] == 2 * results["sharded+split"][0]["steps"]


@pytest.mark.parametrize("case", SAVED)
def test_saving_gathers_what_the_strategy_gathers(results: Any, case: str) -> None:
    first, _second = results[case]
    assert "error" not in first, first["error"]
    # FullyShardedDataParallel's states belong to ranks that the trace does not have.
    left_out = [note for note in first["notes"] if "saving a checkpoint cannot be followed to its end" in note]
    assert all("optimizer state" in note for note in left_out)
    assert bool(left_out) is case.startswith("fsdp")
    assert first["phases"]["setup"] < first["phases"]["saving"] < first["phases"]["training"]


@pytest.mark.parametrize("case", TESTED)
def test_a_test_is_predicted_with_the_weights_of_one_rank(results: Any, case: str) -> None:
    first, second = results[case]
    assert "error" not in first, first["error"]
    assert first["tested"] == second["tested"]
    assert list(first["tested"]) == ["setup", "test"], first["said"]
    # Its half, and a block that is whole while it is divided.
    assert WEIGHTS / 2 <= first["tested"]["setup"] < 1.5 * WEIGHTS


def test_weights_made_on_the_meta_device_are_predicted_alike(results: Any) -> None:
    meta, real = results["meta"][0], results["sharded+split"][0]
    assert meta["breakdown"] == real["breakdown"]


def test_ranks_plan_for_the_least_memory(results: Any) -> None:
    first, second = results["fsdp+poor"]
    assert first["usable"] == second["usable"] < 2**20
    assert first["seen"] == [32, 32]


def test_a_rank_that_fails_while_planning_ends_all_with_one_message(results: Any) -> None:
    first, second = results["sharded+dies"]
    assert first["error"] == "VramGuardError: rank 1 could not plan: RuntimeError: no such file on this machine"
    assert second["error"] == "RuntimeError: no such file on this machine"
    assert first["steps"] == second["steps"] == 0


# --- what is read of a strategy -----------------------------------------------------------------------------------


def strategy(kind: str, **settings: Any) -> Any:
    from lightning.pytorch import strategies

    made = getattr(strategies, kind)(**settings)
    made.parallel_devices = [torch.device("cuda", number) for number in range(4)]
    return made


def trainer(found: Any) -> Any:
    return SimpleNamespace(strategy=found, world_size=8)


def test_the_layout_has_the_strategys_ranks_and_travels_without_its_trainer() -> None:
    from vram_guard_lightning import _layouts

    found = _layouts.layout_of(trainer(strategy("FSDPStrategy")))
    assert (found.gpus, found.node, found.tensor, found.dimensions) == (8, 4, 1, {"shard": 8})
    assert vars(pickle.loads(pickle.dumps(found)).apply) == {}
    keeps = _layouts.layout_of(trainer(strategy("FSDPStrategy", sharding_strategy="SHARD_GRAD_OP")))
    assert (found.reshard, keeps.reshard) == (True, False)
    whole = strategy("DDPStrategy")
    assert _layouts.layout_of(trainer(whole)) is None


def test_deepspeeds_strategy_divides_though_it_inherits_ddps() -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from vram_guard_lightning import _deepspeed, _layouts

    class WithoutEngine(DeepSpeedStrategy):
        """The engine need not be installed."""

        def __init__(self) -> None: ...

    found = trainer(WithoutEngine())
    assert _deepspeed.used(found)
    assert not _layouts.whole(found)
    assert _layouts.installable(found) == ("checkpoint", "offload_optimizer")


@pytest.mark.parametrize(
    ("written", "others"), [({True}, (False,)), ({False}, (True,)), ({True, False}, (True, False)), (set(), ())]
)
def test_modules_that_fully_shard_is_called_for_are_planned_to_do_otherwise(
    written: set[bool], others: tuple[bool, ...]
) -> None:
    from vram_guard_lightning import _layouts

    layout: Any = SimpleNamespace(reshards=written)
    assert _layouts._other_times(trainer(strategy("ModelParallelStrategy")), layout) == others


def predicted(layout: Any = None, **settings: Any) -> Any:
    """Of one of eight ranks, four on a node; under FSDPStrategy with these settings, or under a layout of our own."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy

    from vram_guard import Parallel
    from vram_guard.simulate import estimate
    from vram_guard.step import TrainingStep
    from vram_guard_lightning import _layouts

    class OnCpu(FSDPStrategy):
        """Lightning insists on GPUs for its own class, and on nothing for others."""

    module = pl.LightningModule()
    module.blocks = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(32, 2) for _ in range(3)))
    module.head = torch.nn.Linear(32, 2)
    module.forward = lambda x: module.head(module.blocks(x))
    if layout is None:
        own = OnCpu(auto_wrap_policy={torch.nn.TransformerEncoderLayer}, **settings)
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=own, logger=False, enable_checkpointing=False)
        own.connect(module)
        own.num_nodes, own.parallel_devices = 2, [torch.device("cpu")] * 4
        put = _layouts.StrategyLayout(trainer, _layouts._fully_sharded)
        layout = Parallel(8, node=4, apply=put, offload=_layouts.flat_on_host(trainer))
    step = TrainingStep(
        module,
        lambda size: torch.zeros(size, 5, 32),
        lambda model, batch: model(batch).sum(),
        lambda _parameters: torch.optim.AdamW(module.parameters()),
        parallel=layout,
    )
    return estimate(step, 4)


def test_the_strategys_policy_over_eight_ranks_is_that_of_our_own_layout() -> None:
    from vram_guard import Parallel

    blocks = tuple(f"blocks.{number}" for number in range(3))
    ours, hybrid = (predicted(Parallel(ranks, kind="fsdp1", blocks=blocks)) for ranks in (8, 4))
    assert predicted().breakdown == ours.breakdown
    # Shards within a node of four, as four ranks would have them.
    for settings in ({}, {"device_mesh": (2, 4)}):
        found = predicted(sharding_strategy="HYBRID_SHARD", **settings)
        assert found.breakdown == hybrid.breakdown
    assert ours.breakdown["optimizer_states"] < hybrid.breakdown["optimizer_states"]
    kept = predicted(sharding_strategy="SHARD_GRAD_OP")
    assert kept.breakdown["optimizer_states"] == ours.breakdown["optimizer_states"]
    assert kept.peak_allocated > ours.peak_allocated


def test_parameters_on_the_host_are_predicted_and_batches_stay_whole() -> None:
    from vram_guard.techniques import Sharding
    from vram_guard_lightning import _layouts

    written = trainer(strategy("FSDPStrategy", cpu_offload=True))
    found = _layouts.layout_of(written)
    assert found.offload
    assert list(_layouts.shardings_of(written, found)()) == [Sharding(reshard=False)]
    assert all(layout.offload for layout in _layouts.shardings_of(written, found)().values())
    on_gpu, on_host = predicted(), predicted(cpu_offload=True)
    assert on_gpu.breakdown["optimizer_states"] > on_host.breakdown.get("optimizer_states", 0) == 0
    assert on_host.peak_allocated < on_gpu.peak_allocated
    refused = refused_under(cpu_offload=True)
    assert "last backward pass" in refused["accumulate"]
    assert "an earlier one" in refused["offload_parameters"]
    assert "last backward pass" not in str(refused_under().get("accumulate"))


def refused_under(**settings: Any) -> dict[str, str]:
    """Reasons, by technique, against what a plan may do under FSDPStrategy with these settings."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy

    from vram_guard.guard.settings import GuardSettings
    from vram_guard_lightning._refusals import refusals

    class OnCpu(FSDPStrategy):
        """Lightning insists on GPUs for its own class, and on nothing for others."""

    own = OnCpu(**settings)
    made = pl.Trainer(accelerator="cpu", devices=1, strategy=own, logger=False, enable_checkpointing=False)
    own.connect(pl.LightningModule())
    own.parallel_devices = [torch.device("cpu")] * 2
    return {
        one.technique: one.reason
        for one in refusals(made, own.lightning_module, GuardSettings(), growable="")
        if one.reason
    }


def test_layers_may_be_divided_over_more_than_a_node(monkeypatch: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from vram_guard_lightning import _layouts

    mesh = {"tensor_parallel": SimpleNamespace(size=lambda: 8)}
    monkeypatch.setattr(ModelParallelStrategy, "device_mesh", mesh)
    found = _layouts.layout_of(trainer(strategy("ModelParallelStrategy")))
    assert (found.tensor, found.dimensions, found.reshard) == (8, {"shard": 1, "tensor": 8}, True)


class OtherDeepSpeedStrategy:
    """Of a library that is not followed."""


def test_what_belongs_to_the_real_processes_and_other_strategies_are_refused_by_name() -> None:
    from vram_guard.errors import UnsupportedStepError
    from vram_guard_lightning import _layouts

    real = ("process_group", "ignored_parameters", "ignored_states")
    refused = {rf"FSDPStrategy\({name}=": strategy("FSDPStrategy", **{name: [object()]}) for name in real}
    for named, found in {**refused, "OtherDeepSpeedStrategy": OtherDeepSpeedStrategy()}.items():
        with pytest.raises(UnsupportedStepError, match=named):
            _layouts.layout_of(trainer(found))


@pytest.mark.parametrize(
    ("written", "others"), [("FULL_SHARD", {False}), ("SHARD_GRAD_OP", {True}), ("NO_SHARD", set())]
)
def test_a_sharding_strategy_is_planned_to_free_or_keep_what_it_does_not(written: str, others: set[bool]) -> None:
    from vram_guard_lightning import _layouts

    made = trainer(strategy("FSDPStrategy", sharding_strategy=written))
    ways = _layouts.shardings_of(made, _layouts.layout_of(made))()  # type: ignore[arg-type] - it divides the model
    assert {one.reshard for one in ways if not one.offload} == others
