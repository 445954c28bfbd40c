"""Parts of Lightning's guard by themselves: its hooks, checkpoints, refusals, smaller validation, recovery's edges."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.apply.microbatch import CannotSplitError
from vram_guard.guard.applied import Applied
from vram_guard.techniques import Recipe, Sharding
from vram_guard.watch.recovery import MicroBatchSchedule
from vram_guard_lightning import (
    VramGuard,
    _callback,
    _deepspeed,
    _growth,
    _namespaces,
    _recovery,
    _refusals,
    _sample,
    _smaller_validation,
    _trainer_proxy,
    _validation,
)
from vram_guard_lightning._settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No project's settings."""
    monkeypatch.chdir(tmp_path)


def test_what_is_not_given_is_what_every_guard_takes() -> None:
    assert VramGuard().settings == Settings()
    assert VramGuard(budget="1GiB", max_recoveries=3).settings == Settings(budget="1GiB", max_recoveries=3)


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
    callback.settings = Settings(budget="1GiB", monitor=monitor)
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
    callback.on_train_epoch_end(None, None)
    callback.on_train_batch_end(None, None, None, None, 0)
    callback.on_validation_start(None, None)
    callback.teardown(None, None, "fit")
    ended: list[str] = []
    callback._guard = SimpleNamespace(
        epoch_ends=lambda: ended.append("epoch"), applied=SimpleNamespace(close=lambda: ended.append("closed"))
    )
    shared = SimpleNamespace(ranks=SimpleNamespace(share_buffers=lambda: ended.append("buffers")))
    callback._recovery = SimpleNamespace(recovery=shared)
    callback.on_train_epoch_end(None, None)
    callback.on_validation_start(None, None)
    callback.on_exception(None, None, RuntimeError())
    assert ended == ["epoch", "buffers", "closed"]
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


# --- refusals ---------------------------------------------------------------------------------------------------


class Stepping(pl.LightningModule):  # type: ignore[misc, name-defined]
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Clipping(pl.Callback):  # type: ignore[misc, name-defined]
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("module", "callbacks", "said"),
    [
        (pl.LightningModule, (), ""),
        (pl.LightningModule, (pl.callbacks.Timer,), ""),
        (Stepping, (), "on_before_optimizer_step of Stepping"),
        (pl.LightningModule, (Clipping,), "on_after_backward of Clipping"),
        (
            pl.LightningModule,
            (lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 3: 2}),),
            "change with the epoch",
        ),
    ],
)
def test_hooks_between_backward_and_step_keep_the_optimizer_out_of_the_backward_pass(
    tmp_path: Any, module: Any, callbacks: Any, said: str
) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [one() for one in callbacks])
    found = _refusals._why_not_in_backward(trainer, module())
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("traits", "precision", "before", "clip", "sharding", "technique"),
    [
        ({"Adam"}, "16-mixed", "32-true", None, None, None),
        ({"LBFGS"}, "16-mixed", "32-true", None, None, "precision"),
        ({"LBFGS"}, "bf16-mixed", "32-true", None, None, None),
        ({"LBFGS"}, "16-mixed", "16-mixed", None, None, None),
        ({"Adam", "fused"}, "16-mixed", "32-true", None, None, None),
        ({"Adam", "fused"}, "16-mixed", "32-true", 1.0, None, "precision"),
        ({"Adam"}, "16-mixed", "32-true", 1.0, None, None),
        ({"Lamb", "Adam"}, "32-true", "32-true", None, Sharding(fsdp2=True), "shard"),
        ({"Lamb", "Adam"}, "32-true", "32-true", None, Sharding(reshard=True), None),
        ({"Adam", "fused"}, "32-true", "32-true", None, Sharding(fsdp2=True), None),
        ({"LBFGS"}, "16-mixed", "32-true", None, Sharding(reshard=True), "precision"),
    ],
)
def test_what_of_a_plan_does_not_go_with_the_optimizer(
    traits: set[str], precision: str, before: str, clip: float | None, sharding: Any, technique: str | None
) -> None:
    trainer: Any = SimpleNamespace(gradient_clip_val=clip)
    plan: Any = SimpleNamespace(precision=precision, precision_before=before, recipe=Recipe(sharding=sharding))
    found = _refusals.by_optimizer(trainer, traits | {"Optimizer", "object"}, plan)
    assert (None if found is None else found.technique) == technique


class OwnPrecision(importlib.import_module(f"{NAMESPACE}.plugins.precision").Precision):  # type: ignore[misc, name-defined]
    """A precision plugin of the user's."""


@pytest.mark.parametrize(
    ("settings", "technique", "said"),
    [
        ({}, "precision", None),
        ({"plugins": [OwnPrecision()]}, "precision", "OwnPrecision was set by the user"),
        ({}, "offload_optimizer", "runs on the CPU"),
        ({"gradient_clip_val": 1.0}, "offload_optimizer", "clipped on the GPU"),
        ({"devices": 2, "strategy": "ddp"}, "offload_optimizer", "every rank would update"),
        ({"devices": 2, "strategy": "ddp"}, "shard", None),
        ({}, "shard", "there is one process"),
        ({}, "offload_parameters", "holds whole parameters"),
        ({}, "accumulate", None),
        ({"fast_dev_run": True}, "grow", "fast_dev_run is on"),
        ({"overfit_batches": 2}, "grow", "overfit_batches is set"),
        ({}, "grow", None),
    ],
)
def test_what_a_trainer_does_not_go_with(settings: dict[str, Any], technique: str, said: str | None) -> None:
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer, module = pl.Trainer(**{**quiet, **settings}), cases.make_module()
    found = [
        one.reason
        for one in _refusals.refusals(trainer, module, Settings(), growable="")
        if one.technique == technique and one.reason
    ]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


# --- a smaller validation -----------------------------------------------------------------------------------------


class Counting(pl.Callback):  # type: ignore[misc, name-defined]
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None: ...


class Fetching(pl.LightningModule):  # type: ignore[misc, name-defined]
    def validation_step(self, dataloader_iter: Any) -> None: ...


def vectors(samples: int = 32, batch_size: int = 8) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, 2)), batch_size)


@pytest.mark.parametrize(
    ("settings", "module", "callbacks", "shared", "said"),
    [
        ({}, None, (), False, ""),
        ({"limit_val_batches": 0.5}, None, (), False, "limit_val_batches counts batches"),
        ({"limit_val_batches": 3}, None, (), False, "limit_val_batches counts batches"),
        ({"limit_val_batches": 1}, None, (), False, "limit_val_batches counts batches"),
        ({"overfit_batches": 1}, None, (), False, "limit_val_batches counts batches"),
        ({}, Fetching, (), False, "fetches its batches itself"),
        ({}, None, (Counting,), False, "on_validation_batch_end of Counting is called for every batch"),
        ({}, None, (), True, "the training reads the same loader"),
    ],
)
def test_smaller_batches_of_a_validation_are_refused_where_something_counts_them(
    tmp_path: Any, settings: dict[str, Any], module: Any, callbacks: Any, shared: bool, said: str
) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [one() for one in callbacks], **settings)
    validation, training = vectors(), vectors()
    rounds: Any = SimpleNamespace(loaders=[_validation.Loader(_sample.read(validation), 4)])
    read = _sample.read(validation if shared else training)
    made = cases.make_module() if module is None else module()
    found = _smaller_validation.objection(trainer, made, rounds, 4, read)
    assert (found is not None) == bool(said)
    assert found is None or (found.technique == "evaluation" and said in found.reason)


def test_loaders_whose_batches_are_small_already_stay_as_they_are(tmp_path: Any) -> None:
    trainer, streamed = cases.make_trainer(NAMESPACE, tmp_path), DataLoader(cases.Stream(), 8)
    rounds: Any = SimpleNamespace(loaders=[_validation.Loader(_sample.read(streamed), 4)])
    training = _sample.read(vectors())
    module = cases.make_module()
    assert _smaller_validation.objection(trainer, module, rounds, 4, training) is not None
    assert _smaller_validation.objection(trainer, module, rounds, 8, training) is None
    assert _smaller_validation.objection(trainer, module, None, 8, training) is None
    assert _smaller_validation.samples(rounds) == (0,)
    assert _smaller_validation.samples(None) == ()


@pytest.mark.parametrize(("sanity", "more"), [(0, 0), (1, 2), (3, 6), (-1, -1)])
def test_a_sanity_check_sees_the_same_samples_in_smaller_batches(tmp_path: Any, sanity: int, more: int) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, num_sanity_val_steps=sanity)
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    loader, applied = vectors(), Applied()
    source.dataloader = lambda: [loader]
    was = trainer.num_sanity_val_steps
    change: Any = SimpleNamespace(batch_size=5, batch_size_before=8)
    _smaller_validation.install(trainer, change, applied)
    assert [len(batch[0]) for batch in source.dataloader()[0]] == [4] * 8
    assert trainer.num_sanity_val_steps == (was if sanity < 1 else more)
    applied.close()
    assert trainer.num_sanity_val_steps == was
    assert [len(batch[0]) for batch in loader] == [8] * 4


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
    own = lambda *args, **kwargs: (args, kwargs)  # noqa: E731 - shorter here
    iterator = iter([1])
    assert validation.step(own, iterator) == ((iterator,), {})
    assert validation.step(own, batch=1) == ((), {"batch": 1})
    assert validation.step(own) == ((), {})


# --- DeepSpeed and what user code sees ------------------------------------------------------------------------------


class Engine:
    """DeepSpeed's, as far as it is told about updates."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def set_gradient_accumulation_boundary(self, value: Any) -> None:
        self.told.append(value)


@pytest.mark.parametrize(("last", "told"), [(True, []), (False, [False, None])])
def test_deepspeeds_engine_is_told_that_more_micro_batches_come(last: bool, told: list[Any]) -> None:
    engine = Engine()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(model=engine))
    with pytest.raises(KeyError), _deepspeed.micro_batch(trainer, last=last):
        raise KeyError
    assert engine.told == told


@pytest.mark.parametrize(
    ("kind", "config", "checkpoint", "ways"),
    [
        ("deepspeed1", {}, None, {(None, True): ("deepspeed1", True), (2, False): ("deepspeed2", False),
                                  (2, True): ("deepspeed2", True)}),
        ("deepspeed2", {}, None, {(None, True): ("deepspeed2", True)}),
        ("deepspeed1", {"optimizer": {"type": "Adam"}}, None, {(2, False): ("deepspeed2", False)}),
        ("deepspeed2", {"optimizer": {"type": "Adam"}}, None, {}),
        ("deepspeed1", {}, "last.ckpt", None),
    ],
)  # fmt: skip
def test_other_stages_of_deepspeed(kind: str, config: dict[str, Any], checkpoint: Any, ways: Any) -> None:
    layout: Any = SimpleNamespace(kind=kind, with_=lambda kind, offload: (kind, offload))
    trainer: Any = SimpleNamespace(ckpt_path=checkpoint)
    found = _deepspeed.shardings_of(trainer, layout, config)
    assert (found is None) == (ways is None)
    if found is not None:
        assert {(way.stage, way.states_on_host): one for way, one in found().items()} == ways


def test_a_config_of_any_stage_has_none() -> None:
    assert _deepspeed.of_any_stage({}) == {}
    given = {"a": 1, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert _deepspeed.of_any_stage(given) == {"a": 1, "zero_optimization": {"overlap_comm": True}}
    assert given["zero_optimization"] == {"stage": 2, "overlap_comm": True}


@pytest.mark.parametrize(
    ("splits", "precision", "count"), [(2, "16-mixed", 1), (2, "32-true", 0), (1, "16-mixed", 0), (3, "bf16-mixed", 1)]
)
def test_deepspeeds_sums_in_half_precision_are_said(splits: int, precision: str, count: int) -> None:
    plan: Any = SimpleNamespace(splits=splits, precision=precision, recipe=Recipe())
    assert len(list(_deepspeed.notes(plan))) == count


@pytest.mark.parametrize(
    ("reduction", "told"),
    [("mean", 1.0), ("SUM", 1.0), (torch.max, 1.0), (min, 1.0), (torch.amax, 1.0), (len, None), (lambda _x: 0, None)],
)
def test_logged_values_are_compared_where_their_reduction_is_known(reduction: Any, told: Any) -> None:
    heard: list[Any] = []
    log = _trainer_proxy._Log(SimpleNamespace(log=lambda *given: heard.append(given)))  # type: ignore[arg-type]
    log.values({"a": 1.0}, reduce_fx=reduction)
    log.value("b", 2.0, True)
    assert heard == [("a", told), ("b", 2.0)]


def test_a_view_of_a_trainer_answers_for_it() -> None:
    asked = SimpleNamespace(answer=lambda name, value: (name, value))
    view: Any = _trainer_proxy.TrainerView(SimpleNamespace(current_epoch=3, global_step=5, other=7, loggers=[]), more=1)
    assert (view.current_epoch, view.global_step, view.other, view.more) == (3, 5, 7, 1)
    vars(view)["_asked"] = asked
    assert (view.current_epoch, view.global_step, view.other) == (("current_epoch", 3), ("global_step", 5), 7)
    assert isinstance(view, SimpleNamespace)
    view.replace_loggers(None)
    assert (view.loggers, view.logger) == ([], None)


@pytest.mark.parametrize("factor", [2, 3])
def test_settings_that_count_batches_keep_their_samples(tmp_path: Any, factor: int) -> None:
    """None falls to nothing; numbers that do not divide are rounded, and said; shares are left alone."""
    settings = {
        "val_check_interval": 7,
        "limit_train_batches": 7,
        "log_every_n_steps": 1,
        "max_steps": 10,
        "min_steps": 2,
    }
    trainer, applied = cases.make_trainer(NAMESPACE, tmp_path, **settings), Applied()
    _growth._recount(trainer, factor, applied)
    assert (trainer.val_check_interval, trainer.limit_train_batches, trainer.log_every_n_steps) == (
        7 // factor,
        round(7 / factor),
        1,
    )
    said = "\n".join(applied.notes)
    share = f"{7 // factor * factor / 7:.0%}"
    assert f"val_check_interval counts larger batches: 7 -> {7 // factor} (rounded: {share} of the samples" in said
    assert "log_every_n_steps" not in said
    assert f"max_steps stays 10: steps of {factor} times as many samples" in said
    assert "min_steps = 2" in said
    applied.close()
    assert trainer.val_check_interval == 7
    other = cases.make_trainer(NAMESPACE, tmp_path, val_check_interval=factor * 2, limit_train_batches=0.5)
    _growth._recount(other, factor, applied := Applied())
    assert (other.val_check_interval, other.limit_train_batches) == (2, 0.5)
    assert not any("rounded" in note or "max_steps" in note or "min_steps" in note for note in applied.notes)


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
            "plan": plan, "changes": True, "applied": Applied(), "loss_weight": "mean", "settings": Settings(),
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
