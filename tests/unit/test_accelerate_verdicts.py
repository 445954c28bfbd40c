"""What is concluded of what was seen: relaunches, time on this CPU, and variables of a launch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from vram_guard.codec import to_json  # noqa: E402 - what is tested has to be there
from vram_guard.errors import DoesNotFitError, UnsupportedStepError  # noqa: E402
from vram_guard.plan.descriptions import Reason, Why  # noqa: E402
from vram_guard_accelerate import _signals  # noqa: E402
from vram_guard_accelerate._launch_plan import LaunchPlan, option_words  # noqa: E402
from vram_guard_accelerate._sharding_change import INTRODUCED, ShardingChange  # noqa: E402
from vram_guard_accelerate.cli import _launchers, agreed_plan  # noqa: E402
from vram_guard_accelerate.dry_run import own_ranks  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import LoopProfile  # noqa: E402
from vram_guard_accelerate.dry_run.results import DryRunFailure  # noqa: E402
from vram_guard_accelerate.relaunch import relaunch as relaunches  # noqa: E402
from vram_guard_accelerate.relaunch.relaunch import LaunchChange, Relaunch  # noqa: E402

RECIPE = LaunchPlan().recipe


# --- relaunches ----------------------------------------------------------------------------------------------------

PROFILE = LoopProfile(
    complete=True, batch_size=4, batches_per_step=1, losses=(), counts=(("clip", 1),), rates=(), batches=4,
)  # fmt: skip


def relaunch(precision: str = "32-true") -> Relaunch:
    baseline: Any = SimpleNamespace(precision=precision, profile=PROFILE)
    return Relaunch(LaunchChange(), baseline)


@pytest.mark.parametrize(
    ("change", "settled"),
    [
        ({}, {"grow"}),
        ({"precision": "bf16"}, {"grow", "precision"}),
        ({"sharding": ShardingChange(stage=0)}, {"grow", "shard"}),
        ({"sharding": ShardingChange(states_on_host=True)}, {"grow", "offload_optimizer"}),
    ],
)
def test_what_a_relaunch_has_settled(change: dict[str, Any], settled: set[str]) -> None:
    assert Relaunch(LaunchChange(**change), relaunch().baseline).settled == settled


def test_a_relaunch_that_trains_otherwise_is_refused() -> None:
    relaunch().check("32-true", PROFILE)
    changed = Relaunch(LaunchChange(precision="bf16"), relaunch().baseline)
    changed.check("bf16-mixed", PROFILE)
    with pytest.raises(UnsupportedStepError, match="bf16"):
        changed.check("32-true", PROFILE)
    with pytest.raises(UnsupportedStepError):
        changed.check("bf16-mixed", replace(PROFILE, counts=(("clip", 2),)))


@pytest.mark.parametrize(
    ("change", "precision", "compared"),
    [
        ({}, "32-true", False),
        ({"sharding": ShardingChange(introduced=True)}, "32-true", True),
        ({"sharding": ShardingChange(introduced=True)}, "bf16-mixed", False),
        ({"sharding": ShardingChange(stage=3)}, "bf16-mixed", True),
    ],
)
def test_losses_are_compared_where_they_are_made_of_the_same_operators(
    change: dict[str, Any], precision: str, compared: bool
) -> None:
    one = ("MeanBackward0",)
    given = Relaunch(LaunchChange(**change), relaunch(precision).baseline)
    if compared:
        with pytest.raises(UnsupportedStepError, match="other operators"):
            given.check(precision, replace(PROFILE, losses=one))
    else:
        given.check(precision, replace(PROFILE, losses=one))


def test_a_relaunch_is_told_as_it_would_be_typed() -> None:
    change = LaunchChange(precision="bf16", sharding=ShardingChange(offload=True))
    assert change.words == "--mixed_precision bf16 --fsdp_offload_params true"
    assert (change.kind, LaunchChange(precision="bf16").kind) == ("offload", "precision")
    assert replace(change, precision_option="--dtype").words == "--fsdp_offload_params true --dtype bf16"
    assert change.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_MIXED_PRECISION" not in LaunchChange().environment
    plan = change.applied_to(LaunchPlan(precision="fp16"))
    assert (plan.precision, plan.sharding) == ("bf16", change.sharding)
    assert LaunchChange().applied_to(LaunchPlan(precision="fp16")).precision == "fp16"
    assert option_words(("", 1), ("--a", 2)) == ["--a", "2"]


@dataclass(frozen=True)
class Planned:
    """What a relaunch reads of a plan, and writes there."""

    reason_values: tuple[Any, ...]
    changed: bool = True
    slowdown: float | None = 1.5
    recipe: Any = RECIPE
    precision_before: str = ""
    accumulate_before: int = 0
    batch_size_before: int = 0
    effective_batch_size_before: int = 0
    before: Any = None
    timeline_before: Any = 1


@pytest.mark.parametrize(("changed", "told"), [(True, [Why.SHORTAGE_LAUNCHED, Why.FITS_LAUNCHED]), (False, [])])
def test_a_plan_of_a_relaunch_is_one_of_the_launch_as_typed(monkeypatch: Any, changed: bool, told: list[Why]) -> None:
    monkeypatch.setattr(relaunches, "launch_seconds", lambda _plan, _first: 3.0)
    baseline: Any = SimpleNamespace(
        precision="32-true", accumulate=2, batch_size=8, effective_batch_size=16, estimate="typed", seconds=2.0,
        reason=Reason(Why.FITS), profile=PROFILE,
    )  # fmt: skip
    change = LaunchChange(sharding=ShardingChange(introduced=True))
    short = Reason(Why.SHORTAGE, peak=3, missing=2, usable=1)
    values = (short, Reason(Why.FITS), Reason(Why.CHEAPEST), Reason(Why.CHANGES_LEAST))
    found: Any = Relaunch(change, baseline).combined(Planned(values, changed), None)  # type: ignore[arg-type]
    assert found.slowdown == 1.5 * 3.0 / 2.0
    kinds = [reason.kind for reason in found.reason_values]
    assert kinds == [Why.FITS, Why.LAUNCHED_WITH, *told, Why.CHEAPEST]
    assert (found.precision_before, found.accumulate_before, found.batch_size_before) == ("32-true", 2, 8)
    assert (found.effective_batch_size_before, found.before, found.timeline_before) == (16, "typed", None)
    assert found.recipe.sharding == change.sharding.planned
    unchanged: Any = Relaunch(change, baseline).combined(Planned(values, changed, None), None)  # type: ignore[arg-type]
    assert unchanged.slowdown == 1.5


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_and_options_of_a_division() -> None:
    introduced = ShardingChange(introduced=True)
    assert introduced.variables == {**INTRODUCED, "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    wrapped = replace(introduced, wrapped=("A", "B"))
    assert wrapped.variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert wrapped.variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"
    assert wrapped.options[:5] == ["--use_fsdp", "--fsdp_version", "2", "--fsdp_transformer_layer_cls_to_wrap", "A,B"]
    assert ShardingChange().variables == {}
    assert ShardingChange().options == []
    assert ShardingChange(reshard=True).variables == {"FSDP_RESHARD_AFTER_FORWARD": "true"}
    strategy = ShardingChange(reshard=True, strategy="FULL_SHARD")
    assert strategy.variables == {"FSDP_SHARDING_STRATEGY": "FULL_SHARD"}
    assert strategy.options[:2] == ["--fsdp_sharding_strategy", "FULL_SHARD"]
    kinds = {"shard": introduced, "offload": ShardingChange(offload=True), "reshard": strategy, "": ShardingChange()}
    assert {name: one.kind for name, one in kinds.items()} == {name: name for name in kinds}
    assert ShardingChange(stage=3).kind == "shard"
    engines = [ShardingChange(stage=0), ShardingChange(states_on_host=True)]
    assert [one.by_engine for one in [*engines, introduced]] == [True, True, False]


def test_one_process_alone_is_announced_as_a_group_of_one() -> None:
    alone: dict[str, str] = {}
    ShardingChange(introduced=True).announce(alone)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [alone[name] for name in names] == ["0", "0", "1", "1", "127.0.0.1"]
    assert 1024 <= int(alone["MASTER_PORT"]) < 65536
    several = {"LOCAL_RANK": "1"}
    ShardingChange(introduced=True).announce(several)
    assert "MASTER_PORT" not in several
    other: dict[str, str] = {}
    ShardingChange(offload=True).announce(other)
    assert other == ShardingChange(offload=True).variables


@pytest.mark.parametrize(
    ("source", "ranks", "announced"),
    [
        ("import torch", 2, True),
        ("import torch", 1, False),
        ("import os\nfrom accelerate import Accelerator", 2, False),
        ("  import transformers as t", 2, False),
        ("import accelerated", 2, True),
        ("# uses accelerate", 2, True),
        (None, 2, False),  # a module's name
    ],
)
def test_ranks_are_named_for_scripts_that_read_them_themselves(
    tmp_path: Path, monkeypatch: Any, source: str | None, ranks: int, announced: bool
) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in own_ranks._variables(1, 1)}
    monkeypatch.setattr(os, "environ", kept)
    script = tmp_path / "train.py"
    if source is not None:
        script.write_text(source)
    shape: Any = SimpleNamespace(ranks=ranks, local_ranks=2)
    own_ranks.announce(shape, str(script))
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    expected = ["0", "0", "0", str(ranks), "2"] if announced else [None] * 5
    assert [kept.get(name) for name in names] == expected
    own_ranks.take_back.__wrapped__()
    assert not {*names} & kept.keys()


def test_exit_codes_and_the_signals_that_end() -> None:
    assert [_signals.exit_code(code) for code in (0, 3, -9, -2)] == [0, 3, 137, 130]
    assert not _launchers._in_front(SimpleNamespace(pid=-1))  # type: ignore[arg-type]


# --- a plan that the first process makes for all ---------------------------------------------------------------------


class Store:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> Any:
        return self.kept[key].encode()


@pytest.mark.parametrize("found", [LaunchPlan(grown_batch_size=3), None, DryRunFailure("DoesNotFitError", "too large")])
def test_all_ranks_hold_the_plan_of_the_first(monkeypatch: Any, found: Any) -> None:
    store, planned = Store(), []
    monkeypatch.setattr(agreed_plan, "_store", lambda: store)
    monkeypatch.setattr(agreed_plan, "_planned", lambda _given, ranks: planned.append(ranks) or found)
    answers: list[Any] = []
    for rank in (0, 1):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        try:
            answers.append(agreed_plan.agreed_plan(None))  # type: ignore[arg-type]
        except DoesNotFitError as error:
            answers.append(str(error))
    assert answers == ["too large"] * 2 if isinstance(found, DryRunFailure) else [found] * 2
    assert planned == [2]
    assert store.kept == {"vram_guard/launch_plan": to_json(found)}
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "1")  # of nobody's
    monkeypatch.setattr(agreed_plan, "_store", None)
    if not isinstance(found, DryRunFailure):
        assert agreed_plan.agreed_plan(None) == found  # type: ignore[arg-type]
        assert planned == [2, 1]


def test_processes_that_torchrun_did_not_start_cannot_agree(monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(UnsupportedStepError):
        agreed_plan._store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    monkeypatch.setenv("MASTER_PORT", "123")
    made: list[Any] = []
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *place, **how: made.append((place, how)))
    agreed_plan._store()
    assert made == [(("somewhere", 123), {"is_master": False, "timeout": agreed_plan.PATIENCE})]
    assert agreed_plan.PATIENCE.total_seconds() == 1800
