"""Parts of Lightning's guard by themselves: its hooks, checkpoints, recovery's edges."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")


from vram_guard.apply.microbatch import CannotSplitError
from vram_guard.guard.applied import Applied
from vram_guard.watch.recovery import MicroBatchSchedule
from vram_guard_lightning import (
    VramGuard,
    _callback,
    _namespaces,
    _recovery,
)
from vram_guard_lightning._settings import CallbackSettings

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No project's settings."""
    monkeypatch.chdir(tmp_path)


def test_what_is_not_given_is_what_every_guard_takes() -> None:
    assert VramGuard().settings == CallbackSettings()
    assert VramGuard(budget="1GiB", max_recoveries=3).settings == CallbackSettings(budget="1GiB", max_recoveries=3)


# --- checkpoints ------------------------------------------------------------------------------------------------


def guarded(**facts: Any) -> Any:
    """A callback inside a guarded training, of which only this is asked."""
    made: Any = VramGuard(budget="1GiB")
    known = {"changes": True, "grown": True, "rates_contain": 1.0, "multiplied_by": 1.0, **facts}
    made._guard = SimpleNamespace(**known)
    made.plan = SimpleNamespace(batch_size=32, batch_size_before=8)
    return made


def stepped(name: str = "StepLR", interval: str = "epoch") -> tuple[Any, Any]:
    """A Trainer's part with one scheduler, and a checkpoint of it whose rates are 8."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=8.0)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, 2)
    trainer = SimpleNamespace(
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler, interval=interval)],
        is_global_zero=True,
        strategy=None,
        state=SimpleNamespace(fn="fit"),
    )
    return trainer, {"optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}


@pytest.mark.parametrize(
    ("facts", "found", "kept", "rate"),
    [
        ({"grown": False}, True, None, 8.0),
        ({}, True, (1.0, 1.0, 32), 8.0),
        ({"changes": False}, True, (1.0, 1.0, 8), 8.0),
        ({"rates_contain": 4.0, "multiplied_by": 4.0}, True, (1.0, 4.0, 32), 2.0),
        ({"rates_contain": 4.0, "multiplied_by": 4.0}, False, (4.0, 4.0, 32), 8.0),
        ({"grown": False, "rates_contain": 4.0}, True, (4.0, 1.0, 32), 8.0),
    ],
)
def test_a_checkpoint_says_what_its_rates_contain(facts: Any, found: bool, kept: Any, rate: float) -> None:
    trainer, checkpoint = stepped()
    if not found:
        checkpoint["lr_schedulers"] = [{}]
    guarded(**facts).on_save_checkpoint(trainer, None, checkpoint)
    names = ("learning_rate_factor", "multiplied_by", "batch_size")
    said = checkpoint.get(_callback.CHECKPOINT_KEY)
    assert said == (None if kept is None else dict(zip(names, kept, strict=True)))
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == rate
    if found:
        assert checkpoint["lr_schedulers"][0]["base_lrs"] == [rate]


def test_a_checkpoint_of_weights_alone_has_no_rates() -> None:
    trainer, checkpoint = stepped()
    for made in (VramGuard(budget="1GiB"), guarded()):
        weights: dict[str, Any] = {}
        made.on_save_checkpoint(trainer, None, weights)
        assert weights == {}
    unplanned = guarded(rates_contain=4.0)
    unplanned.plan = None
    unplanned.on_save_checkpoint(trainer, None, checkpoint)
    assert _callback.CHECKPOINT_KEY not in checkpoint


@pytest.mark.parametrize(
    ("function", "states", "saved", "restored"),
    [
        ("fit", [{}], {"learning_rate_factor": 4.0}, 4.0),
        ("fit", [{}], {"batch_size": 32}, 1.0),
        ("fit", [{}], None, 1.0),
        ("fit", [], {"learning_rate_factor": 4.0}, None),
        ("test", [{}], {"learning_rate_factor": 4.0}, None),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_restored_rates_are_known_to_be_multiplied(
    function: str, states: list[Any], saved: Any, restored: float | None, first: bool
) -> None:
    told: list[float] = []
    one, other = guarded(restored=told.append), guarded(restored=told.append)
    trainer, _checkpoint = stepped()
    trainer.callbacks, trainer.state.fn = [one, other], function
    checkpoint = {"optimizer_states": states, _callback.CHECKPOINT_KEY: saved}
    asked = one if first else other
    asked.on_load_checkpoint(trainer, None, checkpoint)
    assert told == ([restored] if first and restored is not None else [])
    assert (asked._restored is not None) == bool(told)
    asked._guard = None
    for rank, warned in ((True, bool(told) and restored != 1.0), (False, False)):
        trainer.is_global_zero = rank
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asked.on_load_checkpoint(trainer, None, checkpoint)
        assert ["4 times" in str(one.message) for one in caught] == [True] * warned


def test_rates_are_multiplied_again_once_after_they_were_restored() -> None:
    scaled: list[int] = []
    callback = guarded(scale_learning_rates=lambda: scaled.append(1))
    for restored, count in ((None, 0), ({}, 1), (None, 1)):
        callback._restored = callback._restored if restored is None else restored
        callback.on_train_batch_start(None, None, None, 0)
        assert (len(scaled), callback._restored) == (count, None)
    callback._guard, callback._restored = None, {}
    callback.on_train_batch_start(None, None, None, 0)
    assert scaled == [1]


@pytest.mark.parametrize(
    ("restored", "changes", "lines"),
    [
        (None, True, ["schedules count steps of 4 times as many samples"]),
        (None, False, []),
        ({"batch_size": 32}, True, ["schedules count steps of 4 times"]),
        ({"batch_size": 16}, True, ["schedules count steps of 4 times", "16 samples, this one has 32"]),
        ({"batch_size": 16}, False, ["16 samples, this one has 8"]),
        ({}, False, []),
        ({}, True, ["schedules count steps of 4 times", "8 samples, this one has 32"]),
    ],
)
def test_schedules_by_steps_are_named_where_steps_have_other_samples(
    restored: Any, changes: bool, lines: list[str]
) -> None:
    trainer, _checkpoint = stepped(interval="step")
    callback = guarded(changes=changes)
    callback._restored = restored
    said = list(callback._schedule_notes(trainer, callback._guard))
    assert len(said) == len(lines)
    assert all(part in line for line, part in zip(said, lines, strict=True))
    for change in ({"is_global_zero": False}, {"lr_scheduler_configs": stepped()[0].lr_scheduler_configs}):
        assert list(callback._schedule_notes(SimpleNamespace(**{**vars(trainer), **change}), callback._guard)) == []
    callback.plan = None
    assert list(callback._schedule_notes(trainer, callback._guard)) == []


# --- a training's hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("monitor", "fast", "zero", "watched"),
    [(1.0, False, True, True), (None, False, True, False), (1.0, True, True, False), (1.0, False, False, False)],
)
def test_rank_0s_gpu_is_watched_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, monitor: Any, fast: bool, zero: bool, watched: bool
) -> None:
    made: list[Any] = []
    logged: list[Any] = []
    monkeypatch.setattr(
        _callback,
        "Utilization",
        lambda *given: made.append(given) or SimpleNamespace(finish=lambda _trainer: ["a line"]),
    )
    monkeypatch.setattr(_callback, "log_metrics", lambda _trainer, values: logged.append(values))
    monkeypatch.setattr(_callback, "_predicted", lambda _plan: {"batch_size": 32})
    callback = guarded(scale_learning_rates=lambda: None, training_starts=lambda: None)
    callback.settings = CallbackSettings(budget="1GiB", monitor=monitor)
    trainer: Any = SimpleNamespace(fast_dev_run=fast, is_global_zero=zero, lr_scheduler_configs=[])
    for _fit in range(2):
        callback.on_train_start(trainer, None)
    assert made == [(trainer, 1.0)] * watched
    assert logged == ([] if fast else [{"batch_size": 32}])
    callback.on_train_end(trainer, None)
    assert callback._utilization is None
    callback.on_train_end(trainer, None)
    callback.plan, callback._logged = None, False
    callback.on_train_start(trainer, None)
    callback._guard = None
    callback.on_train_start(trainer, None)
    assert len(logged) <= 1


def test_hooks_of_a_callback_that_does_not_guard_do_nothing() -> None:
    callback: Any = VramGuard(budget="1GiB")
    callback.on_train_batch_end(None, None, None, None, 0)
    callback.on_validation_start(None, None)
    callback.teardown(None, None, "fit")
    ended: list[str] = []
    callback._guard = SimpleNamespace(applied=SimpleNamespace(close=lambda: ended.append("closed")))
    shared = SimpleNamespace(ranks=SimpleNamespace(share_buffers=lambda: ended.append("buffers")))
    callback._recovery = SimpleNamespace(recovery=shared)
    callback.on_validation_start(None, None)
    callback.on_exception(None, None, RuntimeError())
    assert ended == ["buffers", "closed"]
    assert (callback._guard, callback._recovery) == (None, None)


@pytest.mark.parametrize("zero", [True, False])
def test_what_was_measured_is_said_by_one_rank_and_logged_by_all(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, zero: bool
) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(_callback, "log_metrics", lambda _trainer, values: logged.append(values))
    found = SimpleNamespace(words=lambda: "measured", metrics=lambda: {"peak": 1.0})
    callback = guarded(measured=lambda step: found if step == 3 else None)
    for step in (2, 3):
        callback.on_train_batch_end(SimpleNamespace(global_step=step, is_global_zero=zero), None, None, None, 0)
    assert logged == [{"peak": 1.0}]
    assert capsys.readouterr().out == ("vram_guard: measured\n" if zero else "")


# --- recovery's edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "last"),
    [({}, ""), ({"best_model_path": "best"}, "best"), ({"last_model_path": "last", "best_model_path": "best"}, "last"),
     ({"last_model_path": "", "best_model_path": "best"}, "best")],
)  # fmt: skip
def test_the_last_checkpoint_is_named_where_there_is_one(paths: dict[str, str], last: str) -> None:
    session: Any = SimpleNamespace(trainer=SimpleNamespace(checkpoint_callback=SimpleNamespace(**paths)))
    assert _recovery.Session._last_checkpoint(session) == last
    session.trainer.checkpoint_callback = None
    assert _recovery.Session._last_checkpoint(session) == ""


def test_outputs_that_cannot_be_put_together_are_named_by_their_kind() -> None:
    with pytest.raises(CannotSplitError, match="the dicts of several slices"):
        _recovery._not_merged([None, {"a": 1}])


def test_a_validation_that_gathers_is_cut_no_more() -> None:
    batches = SimpleNamespace(never_cut="", run=lambda data, _work, what: (data, what))
    validation: Any = _recovery.Validation(SimpleNamespace(), batches)  # type: ignore[arg-type]
    validation.gathered()
    assert batches.never_cut == ""
    batches.run = lambda data, _work, what: validation.gathered() or data
    assert validation.step(lambda *_args: "own", "batch") == "batch"
    assert "gathers from the other ranks" in batches.never_cut
    batches.never_cut = ""
    validation.gathered()
    assert batches.never_cut == "", "the round is over"

    def own(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    iterator = iter([1])
    assert validation.step(own, iterator) == ((iterator,), {})
    assert validation.step(own, batch=1) == ((), {"batch": 1})
    assert validation.step(own) == ((), {})


# --- recovery is armed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "splitter", "first", "batch"),
    [
        ({}, "spare", 2, 32),
        ({"changes": False}, "spare", None, 32),
        ({"fits": False}, "spare", 2, None),
        ({"plan": None}, "spare", 2, None),
        ({"decision": None}, None, None, 32),
    ],
)
def test_recovery_begins_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], splitter: Any, first: int | None, batch: int | None
) -> None:
    """With its micro-batches where it is applied, and of the batch of a plan that fits."""
    armed: dict[str, Any] = {}
    undone: list[str] = []
    session = SimpleNamespace(undo=lambda: undone.append("undone"))
    monkeypatch.setattr(_recovery, "arm", lambda *_given, **how: armed.update(how) or session)
    plan = SimpleNamespace(fits=facts.get("fits", True), batch_size=32)
    guard: Any = SimpleNamespace(
        **{
            "plan": plan, "changes": True, "applied": Applied(), "loss_weight": "mean", "settings": CallbackSettings(),
            "decision": SimpleNamespace(splitter=SimpleNamespace(micro_batch_size=2), spare="spare"),
            "training": SimpleNamespace(warn=None), "prediction": None, "out_of_memory": None, **facts,
        }
    )  # fmt: skip
    assert _callback._armed(None, None, guard) is session  # type: ignore[arg-type]
    assert (armed["splitter"], armed["most"]) == (splitter, 8)
    assert armed["schedule"] == MicroBatchSchedule(first, batch)
    guard.applied.close()
    assert undone == ["undone"]


def test_fabric_is_told_once() -> None:
    callback = VramGuard(budget="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _step in range(2):
            callback.on_after_optimizer_step(None, None)
    assert ["does nothing under Fabric" in str(one.message) for one in caught] == [True]


def test_the_prediction_that_is_logged_is_the_plans() -> None:
    plan: Any = SimpleNamespace(
        estimate=SimpleNamespace(peak_reserved=1), before=SimpleNamespace(peak_reserved=2), fits=True, batch_size=4,
        budget=SimpleNamespace(usable=3), micro_batch_size=5,
    )  # fmt: skip
    assert list(_callback._predicted(plan).values()) == [1, 2, 3, 4, 5, True]
