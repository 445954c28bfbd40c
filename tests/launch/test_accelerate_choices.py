"""Which launches are worth another dry run, what is refused by name, and what a reader is told: no script is run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - what is tested has to be there

from vram_guard_accelerate._settings import LaunchSettings  # noqa: E402
from vram_guard_accelerate._sharding_change import ShardingChange  # noqa: E402
from vram_guard_accelerate.apply.sharded_saving import lines_that_save_shards, save_whole  # noqa: E402
from vram_guard_accelerate.planning import _sharding_notes, decide  # noqa: E402
from vram_guard_accelerate.relaunch import engine  # noqa: E402
from vram_guard_accelerate.relaunch.candidates import RelaunchCandidates  # noqa: E402


class Options:
    """The script's own options, with the values that it has."""

    scales_rates = False

    def __init__(self, name: str = "--accumulate") -> None:
        self._name = name

    def accumulation(self, batches_per_step: int) -> str:
        assert batches_per_step == 3
        return self._name


def script(**given: Any) -> Any:
    """A script at its first batch of 16 samples."""
    model = nn.Linear(4, 4)
    inner = {"options": Options(), "resumed": SimpleNamespace(files={}, factor=1.0), "precision_option": ""}
    inner |= {"precision_given": False, "reads_precision": False, "by_trainer": False}
    inner |= {name: given.pop(name) for name in [*given] if name in inner}
    shape = SimpleNamespace(ranks=given.pop("ranks", 2), capability=(8, 0))
    sample = SimpleNamespace(batch_size=given.pop("batch_size", 16), growable="", loader=object())
    return SimpleNamespace(**{
        "script": SimpleNamespace(**inner), "shape": shape, "sample": sample, "root": model, "models": [model],
        "batch_size_option": "--batch", "engine": None, "fsdp_plugin": None, "sharded": False, "by_itself": False,
        "fails_at_others": "", "compiled": False, "precision": "32-true", "fork_server": object(),
        "loader_place": None, "accelerator": None, "why_one_size": "", **given,
    })  # fmt: skip


def seen(**given: Any) -> Any:
    facts = {"batches_per_step": 3, "clips_gradients": False, "own_backward": (), "advances": ()}
    return SimpleNamespace(facts=SimpleNamespace(**{**facts, **given}))


def made(**given: Any) -> Any:
    plan = {"splits": 1, "fits": False, "slowdown": 2.0, "uneven": False, "precision": "32-true"}
    return SimpleNamespace(**{**plan, "recipe": SimpleNamespace(parameters_on_host=()), **given})


def own(first: Any, plan: Any, *, usable: int = 8, allow: tuple[str, ...] = ("accumulate",)) -> list[str]:
    """A sample takes a byte."""
    estimate = SimpleNamespace(at=lambda size: SimpleNamespace(peak_reserved=size))
    planner: Any = SimpleNamespace(
        first=first, facts=seen().facts, settings=LaunchSettings.of({"allow": allow}),
        budget=SimpleNamespace(usable=usable), traces=SimpleNamespace(trace=lambda _request: estimate),
    )  # fmt: skip
    return list(decide._own_options(planner, plan))


def test_smaller_batches_by_the_scripts_own_options_are_named_exactly() -> None:
    assert own(script(), made()) == ["--batch", "8", "--accumulate", "6"]
    assert own(script(), made(), usable=5) == ["--batch", "4", "--accumulate", "12"], "as many as divide the batch"


@pytest.mark.parametrize(
    ("given", "plan", "more"),
    [
        ({"batch_size_option": ""}, {}, {}),
        ({"options": Options("")}, {}, {}),
        ({"why_one_size": "it fails"}, {}, {}),
        ({}, {}, {"usable": 0}),
        ({}, {}, {"allow": ("checkpoint",)}),
        ({}, {"fits": True}, {}),
    ],
)
def test_options_that_do_not_help_or_are_not_known_are_not_named(given: Any, plan: Any, more: Any) -> None:
    assert own(script(**given), made(**plan), **more) == []


# --- DeepSpeed ----------------------------------------------------------------------------------------------------


class Foreign(torch.optim.SGD):
    pass


def engine_of(kind: str = "deepspeed2", config: Any = None, optimizer: Any = None, **given: Any) -> Any:
    made_by = torch.optim.SGD([nn.Parameter(torch.zeros(1))]) if optimizer is None else optimizer
    plugin = SimpleNamespace(deepspeed_config={} if config is None else config)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=made_by))
    accelerator = SimpleNamespace(deepspeed_plugin=plugin, _optimizers=[wrapped])
    return script(engine=SimpleNamespace(kind=kind), accelerator=accelerator, sharded=True, **given)


def test_what_deepspeed_can_do_besides() -> None:
    stages = {kind: engine.stage_of(engine_of(kind)) for kind in engine.deepspeed.STAGES}
    assert stages == engine.deepspeed.STAGES
    assert engine.stage_of(script()) == 0
    last = next(kind for kind, stage in stages.items() if stage == 3)
    assert "divides everything already" in engine.why_not_next_stage(engine_of(last))
    assert engine.why_not_next_stage(engine_of()) == engine.why_not_states_on_host(engine_of()) == ""
    resumed = engine_of(resumed=SimpleNamespace(files={"a": 1}, factor=1.0))
    for why in (engine.why_not_next_stage(resumed), engine.why_not_states_on_host(resumed)):
        assert "goes on from a checkpoint" in why
    on_host = engine_of(config={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert "keeps them there already" in engine.why_not_states_on_host(on_host)
    assert "names the optimizer" in engine.why_not_states_on_host(engine_of(config={"optimizer": {"type": "Adam"}}))
    foreign = engine_of(optimizer=Foreign([nn.Parameter(torch.zeros(1))]))
    assert "Foreign is not one of torch's" in engine.why_not_states_on_host(foreign)


@pytest.mark.parametrize(
    ("allow", "kind", "changes"),
    [
        (("shard", "offload_optimizer"), "deepspeed2", [{"stage": 3}, {"states_on_host": True}]),
        (("shard",), "deepspeed2", [{"stage": 3}]),
        (("offload_optimizer",), "deepspeed2", [{"states_on_host": True}]),
        (("shard", "offload_optimizer"), "deepspeed3", [{"states_on_host": True}]),
        (("checkpoint",), "deepspeed2", []),
    ],
)
def test_settings_of_deepspeed_change_where_they_are_named(
    allow: tuple[str, ...], kind: str, changes: list[dict[str, Any]]
) -> None:
    candidates = RelaunchCandidates(engine_of(kind), seen(), LaunchSettings.of({"allow": allow}))
    assert candidates._divided(ShardingChange()) == [ShardingChange(**change) for change in changes]


# --- what a reader is told ------------------------------------------------------------------------------------------


def settings(*allow: str) -> LaunchSettings:
    return LaunchSettings.of({"allow": allow} if allow else {})


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"sharded": True}, "shards the model already"),
        ({"fork_server": None}, "has to be known before the Accelerator is made"),
        ({"precision": "16-mixed"}, "GradScaler of fp16"),
        ({"compiled": True}, "torch.compile"),
    ],
)
def test_why_parameters_cannot_lie_on_the_host(given: dict[str, Any], why: str) -> None:
    found = _sharding_notes.why_not_on_host(script(**given))
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("given", "plan", "allow", "why", "said"),
    [
        ({}, {"fits": True}, (), "", []),
        ({}, {}, (), "it was lost", ["it was lost"]),
        ({}, {}, (), "", ["FSDP2 was not tried", "parameters on the host were not tried"]),
        ({"ranks": 1}, {}, (), "", ["parameters on the host were not tried"]),
        ({}, {}, ("shard",), "", ["parameters on the host were not tried"]),
        ({}, {}, ("offload_parameters",), "", []),
        ({"sharded": True}, {}, (), "", []),
        ({"models": [1, 2]}, {}, (), "", []),
        ({}, {"recipe": SimpleNamespace(parameters_on_host=("0",))}, (), "", ["save_state writes", "", "hangs"]),
        ({"ranks": 1}, {"recipe": SimpleNamespace(parameters_on_host=("0",))}, (), "", ["save_state writes", ""]),
    ],
)
def test_what_is_told_of_sharding(given: Any, plan: Any, allow: tuple[str, ...], why: str, said: list[str]) -> None:
    notes = _sharding_notes.sharding_notes(script(**given), made(**plan), settings(*allow), why)
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


def test_what_deepspeed_was_not_allowed_by_name_is_told_where_nothing_fits() -> None:
    def told(allow: tuple[str, ...], kind: str = "deepspeed2", **plan: Any) -> list[str]:
        return _sharding_notes.sharding_notes(engine_of(kind), made(**plan), settings(*allow), "")

    assert ["...,shard,offload_optimizer)" in note for note in told(())] == [True]
    assert ["...,offload_optimizer)" in note for note in told((), "deepspeed3")] == [True]
    assert ["...,shard)" in note for note in told(("offload_optimizer",))] == [True]
    assert told(("shard", "offload_optimizer")) == told((), fits=True) == []


SAVES = """\
model.save_pretrained("out", state_dict=state)
model.save_pretrained("out", is_main_process=True)
torch.save(model.state_dict(), "out.pt")
model.save_pretrained("out"); model.state_dict()
model.state_dict(prefix="")
state_dict()
model.state_dict
model.state_dict({})
"""


def test_lines_that_save_shards_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    assert lines_that_save_shards(str(tmp_path / "train.py")) == [3, 4]
    assert lines_that_save_shards(str(tmp_path / "never.py")) == []
    (tmp_path / "broken.py").write_text("def (")
    assert lines_that_save_shards(str(tmp_path / "broken.py")) == []
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    divided, alone, saves = _sharding_notes.divided_notes(script(), made())
    assert "FSDP2 in place of" in divided
    assert "hangs" in alone
    assert "(train.py, lines 3, 4)" in saves
    assert len(_sharding_notes.divided_notes(script(ranks=1), made())) == 1
    (tmp_path / "train.py").write_text("\nmodel.state_dict()\n")
    assert "(train.py, line 2)" in _sharding_notes.divided_notes(script(), made())[-1]
    halves = _sharding_notes.divided_notes(script(ranks=1), made(precision="bf16-mixed"))
    assert "is no autocast" in halves[-1]
    monkeypatch.setattr(sys, "argv", ["-c"])
    by_engine = _sharding_notes.engine_notes
    planned = ShardingChange(stage=3).planned
    assert planned is not None
    assert len(by_engine(engine_of(), made(precision="bf16-mixed"), ShardingChange())) == 1
    last = by_engine(engine_of(), made(precision="bf16-mixed"), ShardingChange(stage=3))
    assert "stage 3 of DeepSpeed's ZeRO: weights are empty" in last[0]
    assert len(last) == 4
    assert not any("autocast" in note for note in last)  # the engine casts by itself
    assert len(by_engine(engine_of("deepspeed1"), made(), ShardingChange(stage=2))) == 2


class Saved(nn.Linear):
    def save_pretrained(self, *given: Any, **options: Any) -> Any:
        return given, options


@pytest.mark.torch_since(2, 6)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sharded_model_is_saved_whole_where_all_processes_save_it(monkeypatch: Any, processes: int) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: processes)
    model, plain = Saved(1, 1), nn.Linear(1, 1)
    accelerator = SimpleNamespace(get_state_dict=lambda one: f"all of {type(one).__name__}")
    for one in (model, plain):
        save_whole(accelerator, one)
    assert not hasattr(plain, "save_pretrained")
    whole = {"state_dict": "all of Saved"} if processes == 2 else {}
    assert model.save_pretrained("out", is_main_process=True) == (("out",), {"is_main_process": True, **whole})
    assert model.save_pretrained("out") == (("out",), {})
    given = {"is_main_process": False, "state_dict": {}}
    assert model.save_pretrained(**given) == ((), given)
    if processes == 1:
        local = SimpleNamespace(full_tensor=None, to_local=lambda: "whole")
        state = {"weight": local, "bias": 1}
        for hook in plain._state_dict_hooks.values():
            hook(plain, state, "", {})
        assert state == {"weight": "whole", "bias": 1}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"by_itself": True}, "trains without Accelerate"),
        ({"precision": "bf16-mixed"}, "is in bf16-mixed already"),
        ({"precision_given": True}, "passes its own mixed_precision"),
        ({"precision_given": True, "precision_option": "--precision"}, ""),
        ({"reads_precision": True}, "asks accelerator.mixed_precision"),
        ({"reads_precision": True, "precision_option": "--precision"}, ""),
    ],
)
def test_why_another_precision_is_not_possible(given: dict[str, Any], why: str) -> None:
    found = decide._why_not_mixed(script(**given))
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"batch_size_option": "", "loader_place": object()}, ""),
        ({"batch_size_option": ""}, "makes no loader with the training's batch size"),
        ({"fails_at_others": "of a fixed size"}, "of a fixed size"),
    ],
)
def test_why_the_batch_cannot_grow(given: dict[str, Any], why: str) -> None:
    found = decide._why_not_grown(script(**given))
    assert why in found
    assert bool(found) == bool(why)
    unknown = script(**given)
    unknown.sample.growable = "its samples have several sizes"
    assert decide._why_not_grown(unknown) == (given.get("fails_at_others") or "its samples have several sizes")


@pytest.mark.parametrize(
    ("given", "within", "why"),
    [
        ({}, True, ""),
        ({"by_itself": True}, False, ""),
        ({"by_itself": True}, True, ""),
        ({"by_itself": True, "models": [1, 2]}, True, "several models"),
        ({"by_itself": True, "compiled": True}, True, "compiles its model"),
        ({"by_itself": True, "fails_at_others": "of a fixed size"}, True, "of a fixed size"),
    ],
)
def test_why_a_plan_is_only_told(given: dict[str, Any], within: bool, why: str) -> None:
    found = decide._only_told(script(**given), SimpleNamespace(within=within))  # type: ignore[arg-type]
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"compiled": True}, "compiles as a whole"),
        ({"why_one_size": "it fails at others"}, "fails at others"),
    ],
)
def test_why_batches_are_not_sliced(given: dict[str, Any], why: str) -> None:
    assert why in decide._why_not_sliced(script(**given))


def test_the_size_of_evaluations_is_the_scripts_own_loaders() -> None:
    traces = SimpleNamespace(evaluation_batch_size=lambda: 7, whole_job=lambda request, most: (request, most))
    job = decide._OwnJob(traces)  # type: ignore[arg-type]
    assert (job.evaluation_batch_size("validation"), job.evaluation_batch_size("training")) == (7, None)
    assert job.trace("asked") == ("asked", None)  # type: ignore[arg-type,comparison-overlap]
    assert job.with_evaluation_batch_size("validation", 3).trace("asked") == ("asked", 3)  # type: ignore[arg-type,comparison-overlap]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


def test_what_cannot_be_put_on_a_divided_model_is_refused() -> None:
    by_engine = decide._beside_shards(engine_of())
    assert {"grow", "checkpoint"}.isdisjoint(by_engine)
    assert (by_engine["shard"], by_engine["offload_optimizer"]) == ("", "")
    assert "DeepSpeed's engine" in by_engine["fused"]
    second = decide._beside_shards(script(sharded=True, fsdp_plugin=SimpleNamespace(fsdp_version=2)))
    assert "shards the model already" in second["offload_parameters"]
    assert {"checkpoint", "shard", "reshard"}.isdisjoint(second)
    first = script(sharded=True, fsdp_plugin=SimpleNamespace(fsdp_version=1))
    assert "checkpoint" not in decide._beside_shards(first)
    first.root = nn.ModuleDict({"_fsdp_wrapped_module": nn.ModuleList(Block() for _ in range(3))})
    assert "checkpoint" in decide._beside_shards(first)
