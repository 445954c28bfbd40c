"""DeepSpeedStrategy: one rank predicted, and plans applied in two real processes (DeepSpeed's engine, gloo, CPU)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

from deepspeed_cases import engine  # noqa: E402 - torch has to be there
from two_ranks import trainings  # noqa: E402

SCRIPT = "lightning_deepspeed_script.py"

PLAIN = ("1+plain", "2+plain", "3+plain")
SPLIT = ("1+split", "3+split")
OTHERS = ("3+checkpoint", "2+tight")

#: Of the module that is trained.
ELEMENTS = 6 * 128 + 128 + 3 * (2 * 128 * 512 + 512 + 128) + 128 * 2 + 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results of every training, in the same two processes; ranks that hang fail the tests."""
    # Stage 3 leaves its own torch.nn.functional.linear in the process, whose graph says nothing of the loss.
    cases = sorted([*PLAIN, *SPLIT, *OTHERS], key="3+plain".__eq__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return trainings(SCRIPT, tmp_path_factory.mktemp("ranks"), cases, limit=280)


def assert_equal(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    assert "error" not in mine, mine["error"]
    assert mine["steps"] == plain["steps"] == 2
    for name, value in plain["weights"].items():
        torch.testing.assert_close(mine["weights"][name], value, rtol=2e-5, atol=2e-6)


@engine
@pytest.mark.parametrize("case", SPLIT)
def test_micro_batches_in_deepspeeds_engine_train_what_whole_batches_do(results: Any, case: str) -> None:
    """Two loaded batches for an update as the Trainer accumulates, each in four micro-batches."""
    for mine, plain in zip(results[case], results[f"{case[0]}+plain"], strict=True):
        assert_equal(mine, plain)
        assert mine["splits"] == 4, mine["said"]
        assert plain["seen"] == [16] * 4
        assert mine["seen"] == [4] * 16


@engine
@pytest.mark.parametrize("case", ["3+checkpoint"])
def test_blocks_are_checkpointed_in_deepspeeds_engine(results: Any, case: str) -> None:
    for mine, plain in zip(results[case], results[f"{case[0]}+plain"], strict=True):
        assert_equal(mine, plain)
        assert mine["forwards"] == [8, 8, 4]  # of four batches; those of checkpointed blocks run twice
        assert plain["forwards"] == [4, 4, 4]


@engine
def test_where_it_does_not_fit_deepspeed_keeps_the_states_on_the_host(results: Any) -> None:
    for mine, plain in zip(results["2+tight"], results["2+plain"], strict=True):
        assert_equal(mine, plain)
        assert mine["fits"], mine["reserved"]
        assert mine["on_host"]
        assert mine["reserved"][1] < mine["reserved"][0]
        assert mine["kept"]  # the strategy has its own config again


@engine
@pytest.mark.parametrize("case", SPLIT)
def test_the_strategy_is_predicted_as_it_is_configured(results: Any, case: str) -> None:
    first, second = results[case]
    assert first["kind"] == f"deepspeed{case[0]}"
    assert first["reserved"] == second["reserved"]
    # Adam's two averages of half of the weights; in float32 there is no other master.
    assert first["breakdown"]["optimizer_states"] == pytest.approx(8 * ELEMENTS / 2, rel=0.55)


# --- what is read of a strategy -----------------------------------------------------------------------------------


def trainer(**settings: Any) -> Any:
    """A Trainer of eight processes, four on a node."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    own = {name: settings.pop(name) for name in ("precision", "gradient_clip_val", "gradient_clip_algorithm")
           if name in settings}  # fmt: skip

    class OnCpu(DeepSpeedStrategy):
        """Lightning insists on GPUs for its own class, and on nothing for others."""

    strategy = OnCpu(**settings)
    made = pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, **own)
    module = pl.LightningModule()
    strategy.connect(module)
    module.trainer = made
    strategy.parallel_devices = [torch.device("cuda", number) for number in range(4)]
    strategy.cluster_environment = SimpleNamespace(world_size=lambda: 8, global_rank=lambda: 0)
    strategy._world_size = 8
    return made


def layout(**settings: Any) -> Any:
    from vram_guard_lightning import _deepspeed

    found = trainer(**settings)
    return _deepspeed.layout_of(found, _deepspeed.config_of(found))


@engine
def test_accumulation_clipping_and_precision_reach_the_config_as_lightning_passes_them_on() -> None:
    from vram_guard_lightning import _deepspeed, _layouts

    found = trainer(stage=3, offload_optimizer=True, precision="bf16-mixed", gradient_clip_val=0.5)
    config = _deepspeed.config_of(found)
    assert config["bf16"] == {"enabled": True}
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.5, 1)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "gradient_clipping" not in found.strategy.config  # Lightning's own is not touched
    assert not _layouts.whole(found)  # though it inherits DDPStrategy
    given = {"zero_optimization": {"stage": 2}, "gradient_clipping": 2.0}
    assert _deepspeed.config_of(trainer(config=given, gradient_clip_val=0.5))["gradient_clipping"] == 2.0


@engine
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 0}, "stage 0"),
        ({"zero_optimization": False}, "stage 0"),
        ({"stage": 5}, "must be 1, 2 or 3, not 5"),
        ({"stage": 3, "offload_parameters": True, "offload_params_device": "nvme"}, "offload_param to nvme"),
        ({"config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}}, "reduce_bucket_size"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "by their norm alone"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    from vram_guard.errors import VramGuardError

    with pytest.raises(VramGuardError, match=words):
        layout(**settings)


@engine
def test_a_model_that_stage_three_makes_divided_is_refused(monkeypatch: Any) -> None:
    import lightning.pytorch as pl

    from vram_guard.errors import UnsupportedStepError

    monkeypatch.setattr(pl.LightningModule, "configure_model", lambda _self: None)
    with pytest.raises(UnsupportedStepError, match="__init__"):
        layout(stage=3)


# --- what a plan may change, and what the engine is told -------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "config", "checkpoint", "ways"),
    [
        (1, {}, None, {(None, True), (2, False), (2, True)}),
        (2, {}, None, {(None, True)}),
        (1, {"optimizer": {"type": "Adam"}}, None, {(2, False)}),
        (2, {"optimizer": {"type": "Adam"}}, None, set()),
        (1, {}, "last.ckpt", None),
    ],
)
def test_other_stages_are_planned_where_the_states_may_be_anywhere(
    stage: int, config: dict[str, Any], checkpoint: Any, ways: Any
) -> None:
    from vram_guard_lightning import _deepspeed

    layout: Any = SimpleNamespace(kind=f"deepspeed{stage}", with_=lambda kind, offload: (kind, offload))
    found: Any = SimpleNamespace(ckpt_path=checkpoint)
    others = _deepspeed.shardings_of(found, layout, config)
    assert (others is None) == (ways is None)
    if others is not None:
        made = others()
        assert {(way.stage, way.states_on_host) for way in made} == ways
        assert all(one == (f"deepspeed{way.stage or stage}", way.states_on_host) for way, one in made.items())


@pytest.mark.parametrize(("last", "told"), [(True, []), (False, [False, None])])
def test_the_engine_is_told_that_more_micro_batches_come(last: bool, told: list[Any]) -> None:
    from vram_guard_lightning import _deepspeed

    heard: list[Any] = []
    engine = SimpleNamespace(set_gradient_accumulation_boundary=heard.append)
    found: Any = SimpleNamespace(strategy=SimpleNamespace(model=engine))
    with pytest.raises(KeyError), _deepspeed.micro_batch(found, last=last):
        raise KeyError
    assert heard == told
