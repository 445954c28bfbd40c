"""What a plan may not do under Lightning, smaller validation, DeepSpeed, what user code sees: each by itself."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.guard.applied import Applied
from vram_guard.techniques import Recipe, Sharding
from vram_guard_lightning import (
    _deepspeed,
    _growth,
    _namespaces,
    _refusals,
    _sample,
    _smaller_validation,
    _trainer_proxy,
    _validation,
)
from vram_guard_lightning._settings import CallbackSettings

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)


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
        for one in _refusals.refusals(trainer, module, CallbackSettings(), growable="")
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


@pytest.mark.parametrize(
    ("strategy", "allow", "refused"),
    [("ddp", ["offload_parameters"], True), ("ddp", ["offload_parameters", "shard"], False),
     ("auto", ["offload_parameters", "shard"], True)],
)  # fmt: skip
def test_whole_weights_stay_on_the_gpu_unless_they_may_be_divided(
    strategy: str, allow: list[str], refused: bool
) -> None:
    devices = 2 if strategy == "ddp" else 1
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False
    )
    found = {
        one.technique
        for one in _refusals.refusals(trainer, cases.make_module(), CallbackSettings(allow=allow), growable="")
        if one.reason
    }
    assert ("offload_parameters" in found) is refused
