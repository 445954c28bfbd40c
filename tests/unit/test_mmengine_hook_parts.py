"""Parts of MMEngine's guard by themselves: its hook, what it changes of a runner, what it refuses."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mmengine")
from vram_guard_mmengine import VramGuardHook, _optim  # noqa: I001 - first: it knows what MMEngine's own imports warn of

import torch
from mmengine.config import ConfigDict
from mmengine.hooks import Hook, LoggerHook
from mmengine.optim import AmpOptimWrapper, LinearLR, LinearMomentum, OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn
from torch.utils.data import DataLoader

from vram_guard.guard.applied import Applied
from vram_guard.techniques import Recipe
from vram_guard.watch.recovery import MicroBatchSchedule
from vram_guard_mmengine import _evaluation, _recovery, _refusals, _smaller_validation, _split_step, _training, hook
from vram_guard_mmengine._settings import HookSettings
from vram_guard_mmengine._summary import META_KEY


def optimizer(lr: float = 8.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9)


def schedules(made: torch.optim.Optimizer) -> list[Any]:
    """One of the rate and one of the momentum."""
    return [LinearLR(made, start_factor=0.5, end=4), LinearMomentum(made, start_factor=0.5, end=4)]


# --- checkpoints ------------------------------------------------------------------------------------------------


def test_rates_of_a_checkpoint_are_divided_and_momentum_stays() -> None:
    made = optimizer()
    driven = schedules(made)
    checkpoint = {"optimizer": made.state_dict(), "param_schedulers": [one.state_dict() for one in driven]}
    before = copy.deepcopy(checkpoint)
    assert _training.save_as_written(SimpleNamespace(param_schedulers=driven), checkpoint, 4.0) is True
    (group,), (was,) = checkpoint["optimizer"]["param_groups"], before["optimizer"]["param_groups"]
    assert (group["lr"], group["momentum"]) == (was["lr"] / 4, was["momentum"])
    rate, momentum = checkpoint["param_schedulers"]
    assert rate["base_values"] == [one / 4 for one in before["param_schedulers"][0]["base_values"]]
    assert momentum == before["param_schedulers"][1]


@pytest.mark.parametrize(
    ("change", "saved"),
    [
        (lambda checkpoint: checkpoint.pop("optimizer"), False),
        (lambda checkpoint: checkpoint.update(param_schedulers={"one": []}), False),
        (lambda checkpoint: checkpoint.update(param_schedulers=[{}, {}]), False),  # the rates have other names there
        (lambda checkpoint: checkpoint.pop("param_schedulers"), True),
    ],
)
def test_a_checkpoint_whose_rates_are_not_found_stays_as_it_is(change: Any, saved: bool) -> None:
    made = optimizer()
    driven = schedules(made)
    checkpoint = {"optimizer": made.state_dict(), "param_schedulers": [one.state_dict() for one in driven]}
    change(checkpoint)
    before = copy.deepcopy(checkpoint)
    assert _training.save_as_written(SimpleNamespace(param_schedulers=driven), checkpoint, 4.0) is saved
    assert (checkpoint == before) is not saved
    by_name = SimpleNamespace(param_schedulers={"one": driven})
    if "param_schedulers" in checkpoint:
        assert _training.save_as_written(by_name, checkpoint, 4.0) is False


def guarded(**facts: Any) -> Any:
    """A hook inside a guarded training, of which only this is asked."""
    made: Any = VramGuardHook(budget="1GiB")
    made._guard = SimpleNamespace(**{"changes": True, "rates_contain": 1.0, "multiplied_by": 1.0, **facts})
    made.plan = SimpleNamespace()
    return made


@pytest.mark.parametrize(
    ("contain", "factor", "found", "kept", "rate"),
    [(1.0, 1.0, True, 1.0, 8.0), (4.0, 4.0, True, 1.0, 2.0), (4.0, 4.0, False, 4.0, 8.0), (2.0, 1.0, True, 2.0, 8.0)],
)
def test_a_checkpoint_says_what_its_rates_contain(
    monkeypatch: pytest.MonkeyPatch, contain: float, factor: float, found: bool, kept: float, rate: float
) -> None:
    monkeypatch.setattr(hook, "summary", lambda _plan, applied: {"applied": applied})
    runner = SimpleNamespace(param_schedulers=[] if found else {"one": []})
    checkpoint: dict[str, Any] = {"optimizer": optimizer().state_dict(), "param_schedulers": [], "meta": {}}
    guarded(rates_contain=contain, multiplied_by=factor).before_save_checkpoint(runner, checkpoint)
    assert checkpoint["meta"] == {META_KEY: {"applied": True, "learning_rates_contain": kept}}
    assert checkpoint["optimizer"]["param_groups"][0]["lr"] == rate
    without: Any = VramGuardHook(budget="1GiB")
    without.before_save_checkpoint(runner, {})
    without._guard = SimpleNamespace()
    without.before_save_checkpoint(runner, {})  # a training that could not be predicted


@pytest.mark.parametrize(
    ("resume", "names", "meta", "restored", "warns"),
    [
        (True, ("optimizer",), {META_KEY: {"learning_rates_contain": 4.0}}, [4.0], True),
        (True, ("optimizer",), {META_KEY: {}}, [1.0], False),
        (True, ("optimizer",), {META_KEY: None}, [1.0], False),
        (True, ("optimizer",), {}, [1.0], False),
        (True, (), {META_KEY: {"learning_rates_contain": 4.0}}, [], False),
        (False, ("optimizer",), {META_KEY: {"learning_rates_contain": 4.0}}, [], False),
    ],
)
def test_restored_rates_are_known_to_be_multiplied(
    caplog: pytest.LogCaptureFixture, resume: bool, names: Any, meta: Any, restored: list[float], warns: bool
) -> None:
    checkpoint = {**{name: {} for name in names}, "meta": meta}
    told: list[float] = []
    first, second = guarded(restored=told.append), guarded(restored=told.append)
    runner = SimpleNamespace(_resume=resume, hooks=[LoggerHook(), first, second], logger=logging.getLogger("a runner"))
    second.after_load_checkpoint(runner, checkpoint)
    assert told == []
    first.after_load_checkpoint(runner, checkpoint)
    assert told == restored
    first._guard = None
    first.after_load_checkpoint(runner, checkpoint)
    assert told == restored
    assert (len(caplog.records), "4 times" in caplog.text) == (warns, warns)
    first.after_load_checkpoint(SimpleNamespace(), {"optimizer": {}})  # no training goes on


# --- learning rates and larger batches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "config", "scaled"),
    [(None, None, False), (None, {"enable": True}, True), ({"enable": True}, {"enable": False}, True),
     (None, {"base_batch_size": 16}, False), ({"enable": False}, {"enable": True}, False)],
)  # fmt: skip
def test_rates_that_mmengine_scales_itself_are_not_scaled_twice(own: Any, config: Any, scaled: bool) -> None:
    runner = SimpleNamespace(auto_scale_lr=own, cfg={} if config is None else {"auto_scale_lr": config})
    plan: Any = SimpleNamespace(batch_size=32, batch_size_before=8, learning_rate_factor=2.0)
    assert _training.auto_scaled(runner) is scaled
    assert _training.RunnerTraining(runner).learning_rate_factor(plan) == (4.0 if scaled else 2.0)


@pytest.mark.parametrize("form", ["list", "dict", "none"])
def test_rates_and_the_schedules_that_drive_them_are_multiplied(form: str) -> None:
    made = optimizer()
    rate, momentum = schedules(made)
    found = {"list": [rate, momentum], "dict": {"a": [rate], "b": [momentum]}, "none": None}[form]
    runner = SimpleNamespace(param_schedulers=found, optim_wrapper=OptimWrapper(made))
    before = made.param_groups[0]["lr"], rate.base_values, momentum.base_values
    assert _training.RunnerTraining(runner).scale_learning_rates(2.0) == ()
    assert made.param_groups[0]["lr"] == 2 * before[0]
    assert rate.base_values == [one * (1 if form == "none" else 2) for one in before[1]]
    assert momentum.base_values == before[2]


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize(
    ("loop", "auto", "said"),
    [
        (EpochBasedTrainLoop, False, "LinearLR (0 - 500), LoggerHook.interval = 50"),
        (EpochBasedTrainLoop, True, "auto_scale_lr follows"),
        (IterBasedTrainLoop, False, "count iterations of 32 samples"),
    ],
)
def test_a_larger_batch_is_what_the_config_might_have_said(config: bool, loop: Any, auto: bool, said: str) -> None:
    given = {"batch_size": 8} if config else DataLoader(range(64), batch_size=8)  # type: ignore[arg-type]
    runner = SimpleNamespace(
        _train_dataloader=given,
        _train_loop={"type": loop},
        param_schedulers=[{"type": "LinearLR", "by_epoch": False, "begin": 0, "end": 500}],
        hooks=[LoggerHook(interval=50)],
        cfg={"auto_scale_lr": {"enable": auto}},
    )
    applied, plan = Applied(), SimpleNamespace(batch_size=32, batch_size_before=8)
    _training.RunnerTraining(runner)._grow(plan, applied)  # type: ignore[arg-type]
    found = runner._train_dataloader
    assert (found["batch_size"] if config else found.batch_size) == 32
    if config:
        assert given == {"batch_size": 8}, "the config's own stays"
    first, *others = applied.notes
    assert first == "train_dataloader.batch_size: 8 -> 32, as if the config said so"
    assert any(said in other for other in others)
    assert any("4 times as many samples" in other for other in others) == (loop is EpochBasedTrainLoop)
    assert any("auto_scale_lr" in other for other in others) is auto


def test_what_counts_iterations_may_stand_alone_or_have_no_end() -> None:
    runner = SimpleNamespace(hooks=[LoggerHook(interval=1), LoggerHook(interval=2)], param_schedulers=None)
    assert list(_training._hooks_by_iteration(runner)) == ["LoggerHook.interval = 2"]
    for one, said in (
        ({"type": "PolyLR", "by_epoch": False, "begin": 3}, ["PolyLR (3)"]),
        ({"type": "PolyLR", "by_epoch": False}, ["PolyLR (0)"]),
        ({"type": "PolyLR", "by_epoch": True}, []),
        ({"generator": [{"type": "PolyLR", "by_epoch": False}]}, []),
        ([LinearLR(optimizer(), end=4)], []),
    ):
        runner.param_schedulers = one
        assert list(_training._schedules_by_iteration(runner)) == said


def test_an_optimizer_is_exchanged_once_however_often_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_training, "optimizer_for", lambda given, _recipe: ("exchanged", given))
    wrapper = OptimWrapper(optimizer())
    made, applied = wrapper.optimizer, Applied()
    builder = SimpleNamespace(build_optim_wrapper=lambda *_args, **_kwargs: wrapper)
    _training._change_optimizer(SimpleNamespace(strategy=builder), None, applied)  # type: ignore[arg-type]
    assert builder.build_optim_wrapper({}) is builder.build_optim_wrapper({}) is wrapper
    assert wrapper.optimizer == ("exchanged", made)
    applied.close()


def test_a_loss_that_cannot_be_cut_is_not_recovered_either() -> None:
    training = _training.RunnerTraining(SimpleNamespace(world_size=1))
    assert training.why_not_recovered({"accumulate": "a reason"}) == "a reason"
    assert training.why_not_recovered({"grow": "another"}) == training.why_not_recovered({}) == ""
    assert training.why_left_alone() == ""
    assert (training.ranks.rank, training.ranks.world_size, training.ranks.broadcast({"a": 1}, 0)) == (0, 1, {"a": 1})
    assert training.device == torch.device("cpu")


# --- evaluations ------------------------------------------------------------------------------------------------


def test_states_that_a_training_has_left_are_beside_an_evaluation() -> None:
    assert _evaluation._left_of_training(SimpleNamespace()) == []
    assert _evaluation._left_of_training(SimpleNamespace(optim_wrapper={"optimizer": {"type": "Adam"}})) == []
    weight = nn.Parameter(torch.ones(3))
    made = torch.optim.Adam([weight])
    assert _evaluation._left_of_training(SimpleNamespace(optim_wrapper=OptimWrapper(made))) == []
    weight.sum().backward()
    made.step()
    state = made.state[weight]
    state["elsewhere"], state["name"] = torch.ones(3, device="meta"), "no tensor"
    found = _evaluation._left_of_training(SimpleNamespace(optim_wrapper=OptimWrapper(made)))
    assert [id(one) for one in found] == [id(state["exp_avg"]), id(state["exp_avg_sq"])], "a step's number is no array"


def test_a_loader_is_built_as_the_loop_would_build_it() -> None:
    asked: list[Any] = []
    runner = SimpleNamespace(
        _randomness_cfg={}, seed=5, build_dataloader=lambda given, **how: asked.append((given, how)) or "built"
    )
    config, own = {"batch_size": 4}, DataLoader(range(4))  # type: ignore[arg-type]
    assert _evaluation.built(runner, own) is own
    assert _evaluation.built(runner, config) == "built"
    runner._randomness_cfg = {"diff_rank_seed": True}
    _evaluation.built(runner, config)
    assert asked == [(config, {"seed": 5, "diff_rank_seed": one}) for one in (False, True)]


class OfRounds(Hook):
    """A hook of the user's that is called for every batch of a validation."""

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("hooks", "batches", "num_samples", "same", "said"),
    [
        ((), 4, None, False, ""),
        ((LoggerHook(),), 4, None, False, ""),
        ((OfRounds(),), 4, None, False, "after_val_iter of OfRounds is called for every batch"),
        ((), None, None, False, "no known end"),
        ((), 4, None, True, "the training reads the same loader"),
        ((), 4, 16, False, "num_batch_per_epoch counts batches"),
    ],
)
def test_smaller_batches_of_a_validation_are_refused_where_something_counts_them(
    hooks: tuple[Hook, ...], batches: int | None, num_samples: int | None, same: bool, said: str
) -> None:
    data: Any = torch.utils.data.TensorDataset(torch.ones(32, 2))
    data.num_samples = num_samples
    loader, training = DataLoader(data, 8), DataLoader(data, 8)
    rounds: Any = SimpleNamespace(batches=batches, loader=loader)
    runner = SimpleNamespace(hooks=hooks, world_size=1)
    found = _smaller_validation.objection(runner, rounds, 4, loader if same else training)
    assert (found is not None) == bool(said)
    assert found is None or (found.technique == "evaluation" and said in found.reason)
    assert _smaller_validation.objection(runner, None, 4, training) is not None


@pytest.mark.parametrize("kind", ["config", "built", "loop"])
def test_smaller_batches_are_delivered_and_taken_back(kind: str) -> None:
    config, loader, applied = {"batch_size": 8}, DataLoader(torch.ones(24, 2), 8), Applied()  # type: ignore[arg-type]
    given: Any = config if kind == "config" else loader
    runner = SimpleNamespace(_val_loop={}, _val_dataloader=given)
    if kind == "loop":
        runner = SimpleNamespace(_val_loop=SimpleNamespace(dataloader=loader), _val_dataloader="not looked at")
    change: Any = SimpleNamespace(batch_size=5, batch_size_before=8)
    _smaller_validation.install(runner, change, applied)
    sizes = [len(batch) for batch in loader]
    assert sizes == ([8] * 3 if kind == "config" else [4] * 6), "evenly, in as few batches of at most 5"
    if kind == "config":
        assert (runner._val_dataloader["batch_size"], config["batch_size"]) == (4, 8)
    applied.close()
    assert [len(batch) for batch in loader] == [8] * 3
    assert kind == "loop" or runner._val_dataloader is given


# --- refusals ---------------------------------------------------------------------------------------------------


class OwnStep(OptimWrapper):  # type: ignore[misc]
    """A wrapper of the user's."""

    def backward(self, loss: Any, **kwargs: Any) -> None: ...


def facts(kind: Any = OptimWrapper, precision: str = "32-true", *, built: bool = False) -> Any:
    return _optim.OptimFacts(kind, precision, 1, None, None, lambda _model: optimizer(), built=built)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "pinned", "mixed", "in_backward"),
    [
        (facts(), False, "", ""),
        (facts(built=True), False, "built before the runner", ""),
        (facts(AmpOptimWrapper, "16-mixed"), False, "is in 16-mixed already, and stays so", "looks at all gradients"),
        (facts(AmpOptimWrapper, "16-mixed"), True, "", "looks at all gradients"),
        (facts(OwnStep), False, "OwnStep was chosen by the user", "OwnStep looks at all gradients"),
    ],
)
def test_what_an_optimizer_wrapper_does_not_go_with(given: Any, pinned: bool, mixed: str, in_backward: str) -> None:
    for found, said in (
        (_refusals._why_not_mixed(given, pinned=pinned), mixed),
        (_refusals._why_not_in_backward(given), in_backward),
    ):
        assert said in found
        assert bool(found) == bool(said)


def test_a_backward_of_the_users_keeps_batches_whole() -> None:
    runner = SimpleNamespace(model=nn.Linear(1, 1), optim_wrapper=OwnStep(optimizer()))
    assert _refusals._why_whole(runner, facts()) == ""
    for given in (facts(OwnStep), facts(built=True)):
        assert _refusals._why_whole(runner, given).startswith("backward of ")


@pytest.mark.parametrize(
    ("config", "technique", "said"),
    [
        ({}, "checkpoint", False),
        ({"activation_checkpointing": ["layers"]}, "checkpoint", True),
        ({}, "8bit", False),
        ({"resume": True}, "8bit", True),
        ({}, "offload_frozen", True),
        ({}, "half", True),
    ],
)
def test_what_a_config_does_not_go_with(config: dict[str, Any], technique: str, said: bool) -> None:
    runner = SimpleNamespace(
        model=nn.Linear(1, 1), cfg=ConfigDict(config), world_size=1, _resume=config.pop("resume", False)
    )
    settings: Any = VramGuardHook(budget="1GiB").settings
    found = {one.technique: one.reason for one in _refusals.refusals(runner, facts(), settings, growable="small")}
    assert bool(found.get(technique)) is said
    assert (found["grow"], found["accumulate"], found["precision"]) == ("small", "", "")
    assert found["shard"] == "there is one process"


# --- micro-batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempted", [False, True])
def test_one_of_several_micro_batches_updates_nothing(attempted: bool) -> None:
    """Gradients of all, one step, and the wrapper has counted one batch."""
    weight = nn.Parameter(torch.zeros(2))
    wrapper = OptimWrapper(torch.optim.SGD([weight], lr=1.0))
    attempt: Any = SimpleNamespace(backward=lambda run: run()) if attempted else None
    for number, share in enumerate((0.25, 0.75)):
        part: Any = _split_step.MicroBatchOptimWrapper(
            wrapper, SimpleNamespace(weight=share, last=number == 1), attempt
        )
        assert isinstance(part, OptimWrapper)
        assert part.optimizer is wrapper.optimizer
        with part.optim_context(nn.Linear(1, 1)):
            part.update_params((weight * torch.tensor([1.0, 2.0])).sum())
        assert wrapper._inner_count == number
        assert weight.tolist() == ([0.0, 0.0] if number == 0 else [-1.0, -2.0])
    part.note = 3
    assert wrapper.note == 3


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ({}, []),
        ({"precision": "bf16-mixed"}, ["precision"]),
        ({"batch_size": 16}, ["batch"]),
        ({"evaluation": SimpleNamespace(batch_size=2, batch_size_before=4)}, ["evaluation"]),
        ({"optimizer": "fused"}, ["optimizer"]),
    ],
)
def test_what_a_plan_changes_is_changed_before_anything_is_built(change: dict[str, Any], done: list[str]) -> None:
    recipe = Recipe(optimizer=change.get("optimizer", "as-written"))
    plan = {"precision": "32-true", "precision_before": "32-true", "batch_size": 8, "batch_size_before": 8}
    decision: Any = SimpleNamespace(plan=SimpleNamespace(**{**plan, "evaluation": None, "recipe": recipe, **change}))
    runner = SimpleNamespace(
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 1.0}},
        _train_dataloader={"batch_size": 8}, _train_loop={"type": EpochBasedTrainLoop}, cfg={}, hooks=[],
        _val_loop={}, _val_dataloader={"batch_size": 4}, param_schedulers=None, build_optim_wrapper=print,
    )  # fmt: skip
    _training.RunnerTraining(runner).apply(decision, "mean", Applied())
    found = {
        "precision": "type" in runner.optim_wrapper,
        "batch": runner._train_dataloader["batch_size"] == 16,
        "evaluation": runner._val_dataloader["batch_size"] == 2,
        "optimizer": runner.build_optim_wrapper is not print,
    }
    assert [name for name, changed in found.items() if changed] == done


@pytest.mark.parametrize("no_recovery", [True, False])
@pytest.mark.parametrize(
    ("facts", "splits", "batch"),
    [({}, True, 32), ({"changes": False}, False, 8), ({"spare": None}, True, None), ({"decision": None}, False, None)],
)
def test_micro_batches_are_planned_or_found_by_recovery(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], splits: bool, batch: int | None, no_recovery: bool
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(_split_step, "install", lambda *_given: done.append("split") or print)
    monkeypatch.setattr(
        _recovery, "arm", lambda _runner, spare, schedule, *_more, **_how: done.append((spare, schedule)) or print
    )
    splitter = SimpleNamespace(micro_batch_size=2)
    decision = SimpleNamespace(splitter=splitter, spare=facts.get("spare", "spare"))
    guard: Any = SimpleNamespace(
        **{
            "decision": decision, "changes": True, "no_recovery": no_recovery, "settings": HookSettings(),
            "loss_weight": "mean", "applied": Applied(), "prediction": None, "out_of_memory": None,
            "training_starts": lambda: None, **facts,
        }
    )  # fmt: skip
    hook._arm(SimpleNamespace(model=None), guard, SimpleNamespace(batch_size=32, batch_size_before=8))  # type: ignore[arg-type]
    if no_recovery or batch is None:
        assert done == ["split"] * splits
    else:
        assert done == [("spare", MicroBatchSchedule(2 if splits else None, batch))]
