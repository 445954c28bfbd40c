"""More of Lightning's adapter by itself: rehearsals, strategies, what is applied, what the guard sees of a Trainer."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.applied import Applied
from vram_guard.techniques import Recipe, Sharding
from vram_guard_lightning import (
    _apply,
    _capture,
    _closure,
    _dividing,
    _hooks,
    _layouts,
    _namespaces,
    _play,
    _rehearsal,
    _sample,
    _shadow,
    _step_metrics,
    _training,
)

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = _namespaces.installed()[0].__name__
pl = importlib.import_module(NAMESPACE)


def of_two(strategy: Any = "ddp", **settings: Any) -> Any:
    """A Trainer of two processes, none of which has been started."""
    quiet = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(**quiet, strategy=strategy, **settings)


# --- rehearsals ---------------------------------------------------------------------------------------------------


class Stepping(pl.LightningModule):  # type: ignore[misc, name-defined]
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Moving(pl.LightningModule):  # type: ignore[misc, name-defined]
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Ending(pl.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None: ...


class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("module", "callback", "data", "names", "reads"),
    [
        (pl.LightningModule, None, None, [], False),
        (Stepping, None, None, ["on_before_optimizer_step"], True),
        (Moving, None, None, ["on_after_batch_transfer"], False),
        (pl.LightningModule, Ending, None, ["on_train_batch_end"], True),
        (pl.LightningModule, None, Data, ["on_before_batch_transfer"], False),
        (pl.LightningModule, pl.callbacks.LearningRateMonitor, None, [], False),
    ],
)
def test_hooks_of_the_users_are_counted_and_some_may_read_what_a_step_left(
    tmp_path: Any, module: Any, callback: Any, data: Any, names: list[str], reads: bool
) -> None:
    from vram_guard_lightning import VramGuard

    callbacks = [VramGuard(budget="1GiB"), *([] if callback is None else [callback()])]
    trainer = cases.make_trainer(NAMESPACE, tmp_path, callbacks, logger=callback is pl.callbacks.LearningRateMonitor)
    made, counted = module(), []
    trainer.datamodule = None if data is None else data()
    step: Any = SimpleNamespace(count_calls=lambda owner, found, label: counted.append((owner, found, label)))
    _rehearsal._count(step, trainer, made)
    assert sorted(name for _owner, found, _label in counted for name in found) == names
    assert all(label == ("" if owner is made else f"{type(owner).__name__}.") for owner, _found, label in counted)
    assert _rehearsal.read_afterwards(trainer, made) is reads
    assert not any(isinstance(owner, VramGuard) for owner, _found, _label in counted)


@pytest.mark.parametrize("double", [False, True])
def test_a_rehearsal_is_one_quiet_process_on_the_cpu(double: bool) -> None:
    from vram_guard_lightning import VramGuard

    timer, own = pl.callbacks.Timer(), Ending()
    trainer = of_two(callbacks=[VramGuard(budget="1GiB"), timer, own], limit_val_batches=3, num_sanity_val_steps=2)
    module = cases.make_module()
    _rehearsal.on_cpu(trainer, module, double=double)
    assert (trainer.world_size, type(trainer.strategy).__name__) == (1, "SingleDeviceStrategy")
    assert trainer.strategy.root_device.type == "cpu"
    assert type(trainer.precision_plugin).__name__ == ("DoublePrecision" if double else "Precision")
    assert trainer.strategy.lightning_module is module
    _rehearsal.quiet(trainer)
    assert own in trainer.callbacks
    assert not any(isinstance(one, (VramGuard, pl.callbacks.Timer)) for one in trainer.callbacks)
    assert (trainer.limit_val_batches, trainer.num_sanity_val_steps) == (0, 0)


def test_loggers_of_a_rehearsal_write_nothing_and_are_heard(tmp_path: Any) -> None:
    heard: list[Any] = []
    step: Any = SimpleNamespace(count_calls=lambda owner, names, label: heard.append((owner, label)))
    without = cases.make_trainer(NAMESPACE, tmp_path)
    _rehearsal._count_logging(step, without)
    assert (heard, without.loggers) == ([], [])
    trainer = cases.make_trainer(NAMESPACE, tmp_path, logger=pl.loggers.CSVLogger(tmp_path))
    _rehearsal._count_logging(step, trainer)
    (silent,) = trainer.loggers
    assert type(silent).__name__ == "DummyLogger"
    assert [label for _owner, label in heard] == ["logger.", "logger.experiment."]
    batches = _rehearsal._RepeatedBatch("batch")
    assert list(batches) == ["batch"] * len(batches)
    assert len(batches) >= 2


def test_metrics_are_compared_by_what_they_compute() -> None:
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    mean, both = MeanMetric(), MetricCollection([MeanMetric(), SumMetric()])
    mean.update(torch.tensor([1.0, 3.0]))
    both.update(torch.tensor([1.0, 3.0]))
    found = _rehearsal._computed({"a": mean, "b.c": both})
    assert {name: float(value) for name, value in found.items()} == {
        "a.compute()[0]": 2.0, "b.c.compute()[0]": 2.0, "b.c.compute()[1]": 4.0,
    }  # fmt: skip


# --- strategies ---------------------------------------------------------------------------------------------------


class Configuring(pl.LightningModule):  # type: ignore[misc, name-defined]
    def configure_model(self) -> None: ...


class OnCpu(pl.strategies.FSDPStrategy):  # type: ignore[misc, name-defined]
    """Lightning insists on GPUs for its own class, and on nothing for others."""


@pytest.mark.parametrize(
    ("strategy", "module", "divides"),
    [
        (lambda: "ddp", Configuring, False),
        (lambda: OnCpu(), pl.LightningModule, False),
        (lambda: OnCpu(), Configuring, True),
    ],
)
def test_a_model_that_configure_model_divides_is_captured_before(strategy: Any, module: Any, divides: bool) -> None:
    trainer = of_two(strategy())
    trainer.strategy.connect(module())
    assert _layouts.shards_in_configure_model(trainer) is divides
    assert _layouts.whole(trainer) is (strategy() == "ddp")


@pytest.mark.parametrize(
    ("settings", "clip", "installed"),
    [({}, None, ("checkpoint",)), ({"activation_checkpointing_policy": {nn.Linear}}, None, ()),
     ({"cpu_offload": True}, 1.0, ("checkpoint",))],
)  # fmt: skip
def test_what_can_be_put_on_blocks_before_they_are_divided(
    settings: dict[str, Any], clip: float | None, installed: tuple[str, ...]
) -> None:
    trainer = of_two(OnCpu(**settings))
    assert _layouts.installable(trainer) == installed
    assert _layouts.flat_on_host(trainer) is bool(settings.get("cpu_offload"))
    assert not _layouts.flat_on_host(of_two())


@pytest.mark.parametrize(
    ("device", "clip", "refused"), [("cuda", 1.0, True), ("cuda", None, False), ("cpu", 1.0, False)]
)
def test_gradients_on_the_host_are_not_clipped_by_nccl(device: str, clip: float | None, refused: bool) -> None:
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), gradient_clip_val=clip, world_size=2
    )
    assert bool(_layouts.why_not_offloaded(trainer)) is refused
    assert _dividing.offloads(trainer) is not refused
    assert ("offload_parameters" in _layouts.installable(trainer)) is not refused


@pytest.mark.parametrize(
    ("own", "reshard", "name"),
    [("FULL_SHARD", False, "SHARD_GRAD_OP"), ("SHARD_GRAD_OP", True, "FULL_SHARD"), ("FULL_SHARD", None, None)],
)
def test_a_strategy_is_set_to_free_or_keep_weights(own: str, reshard: bool | None, name: str | None) -> None:
    trainer = of_two(OnCpu(sharding_strategy=own))
    found = _layouts.changed_settings(trainer, Sharding(reshard=reshard, offload=reshard is None))
    assert {key: value.name for key, value in found.items()} == ({} if name is None else {"sharding_strategy": name})
    assert _layouts.changed_settings(of_two(), Sharding(reshard=True)) == {}
    with _layouts.changed(trainer, Sharding(reshard=reshard, offload=reshard is None)):
        assert trainer.strategy.sharding_strategy.name == (name or own)
    assert trainer.strategy.sharding_strategy.name == own


@pytest.mark.parametrize("offloads", [True, False])
def test_ways_to_divide_are_those_that_the_strategy_leaves_open(
    monkeypatch: pytest.MonkeyPatch, offloads: bool
) -> None:
    monkeypatch.setattr(_layouts, "why_not_offloaded", lambda _trainer: "" if offloads else "a reason")
    monkeypatch.setattr(_layouts, "_other_times", lambda *_: (True, False))
    written = SimpleNamespace(with_=lambda sharding: sharding)
    layout: Any = SimpleNamespace(apply=written, reshard=None, offload=False, with_=lambda **settings: settings)
    found = _layouts.shardings_of(of_two(), layout)()
    ways = [(way.reshard, bool(way.offload)) for way in found]
    assert ways == [(True, False), (False, False), *([(None, True), (True, True)] if offloads else [])]
    for way, made in found.items():
        assert made == {"apply": way, "reshard": way.reshard, "offload": bool(way.offload)}


# --- what is applied ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "plugin", "notes"),
    [("16-mixed", "bf16-mixed", 1), ("bf16-mixed", "bf16-mixed", 0), ("32-true", None, 0)],
)
def test_lightnings_own_plugin_for_the_device_that_trains(
    tmp_path: Any, precision: str, plugin: str | None, notes: int
) -> None:
    trainer, applied = cases.make_trainer(NAMESPACE, tmp_path), Applied()
    was = trainer.strategy.precision_plugin
    _apply._set_precision(trainer, precision, applied)
    assert len(applied.notes) == notes
    assert plugin is None or trainer.strategy.precision_plugin.precision == plugin
    applied.close()
    assert trainer.strategy.precision_plugin is was


def test_schedulers_follow_an_optimizer_that_is_exchanged(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = cases.make_module()
    old, kept = (torch.optim.SGD(module.parameters(), lr=1.0) for _ in range(2))
    new = torch.optim.SGD(module.parameters(), lr=2.0)
    monkeypatch.setattr(_apply, "optimizer_for", lambda one, _recipe: new if one is old else one)
    trainer = cases.make_trainer(NAMESPACE, tmp_path)
    trainer.strategy.connect(module)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in (old, kept)]
    trainer.strategy.optimizers = [old, kept]
    trainer.strategy.lr_scheduler_configs = [SimpleNamespace(scheduler=one) for one in schedulers]
    _apply.after_setup(trainer, Recipe(), Applied())
    assert trainer.strategy.optimizers == [new, kept]
    assert [one.optimizer for one in schedulers] == [new, kept]


@pytest.mark.parametrize(
    ("sharding", "set_to"),
    [(None, []), (Sharding(reshard=True), [True]), (Sharding(reshard=False), [False]), (Sharding(offload=True), []),
     (Sharding(reshard=True, fsdp2=True), [])],
)  # fmt: skip
def test_weights_are_freed_or_kept_where_fully_shard_has_divided_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, sharding: Any, set_to: list[bool]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(_apply, "set_resharding", lambda model, reshard: told.append(reshard))
    trainer = cases.make_trainer(NAMESPACE, tmp_path)
    trainer.strategy.connect(cases.make_module())
    _apply.after_setup(trainer, Recipe(sharding=sharding), Applied())
    assert told == set_to


@pytest.mark.parametrize(
    ("strategy", "layer", "waits"),
    [("ddp", nn.BatchNorm1d, False), ("ddp", nn.SyncBatchNorm, True), ("sync", nn.BatchNorm1d, True)],
)
def test_forwards_that_wait_for_other_ranks_are_known(strategy: str, layer: Any, waits: bool) -> None:
    trainer = of_two("ddp", sync_batchnorm=strategy == "sync")
    assert _closure._synchronised(trainer) is (strategy == "sync"), "before fit there is no module"
    module = pl.LightningModule()
    module.layer = layer(1)
    trainer.strategy.connect(module)
    assert _closure._synchronised(trainer) is waits


# --- what the guard sees of a Trainer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "alone", "factor"),
    [(None, False, 2.0), (pl.callbacks.BatchSizeFinder, True, 2.0), (pl.callbacks.LearningRateFinder, False, 1.0)],
)
def test_lightnings_own_finders_are_left_to_find(tmp_path: Any, callback: Any, alone: bool, factor: float) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [] if callback is None else [callback()])
    training = _training.LightningTraining(trainer, cases.make_module())
    assert bool(training.why_left_alone()) is alone
    plan: Any = SimpleNamespace(learning_rate_factor=2.0, evaluation=None)
    assert training.learning_rate_factor(plan) == factor
    assert (training.ranks.rank, training.ranks.world_size, training.device) == (0, 1, torch.device("cpu"))
    assert training.ranks.broadcast("value", 0) == "value"


@pytest.mark.parametrize("zero", [True, False])
def test_one_rank_speaks(capsys: Any, monkeypatch: pytest.MonkeyPatch, zero: bool) -> None:
    from vram_guard.report import text

    monkeypatch.setattr(text, "show", lambda _plan, verbose: True)
    trainer: Any = SimpleNamespace(is_global_zero=zero)
    training = _training.LightningTraining(trainer, None)  # type: ignore[arg-type]
    training.report(None, ["a line"], applied=True, verbose=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ("a line\n" if zero else "")
    with pytest.warns(UserWarning, match="vram_guard: a reason") if zero else pytest.MonkeyPatch.context():
        training.warn("a reason")


def test_an_output_that_nobody_reads_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=closed, encoding="utf-8", flush=lambda: None))
    _training.write("a line\n")


class Other:
    """No Trainer."""


def test_trainers_and_classes_are_known_in_every_namespace(tmp_path: Any) -> None:
    for name in cases.NAMESPACES:
        assert _namespaces.of(cases.make_trainer(name, tmp_path)).__name__ == name
        timer = importlib.import_module(name).callbacks.Timer()
        assert _namespaces.is_a(timer, "callbacks.Timer")
        assert not _namespaces.is_a(timer, "callbacks.EarlyStopping")
        assert not _namespaces.is_a(timer, "callbacks.missing.Missing")
    with pytest.raises(
        UnsupportedStepError, match=r"Other is not a Trainer of lightning\.pytorch or pytorch_lightning"
    ):
        _namespaces.of(Other())
    loaders = {"a": [1], "b": [2]}
    assert _namespaces.loader_tree(pl.utilities.CombinedLoader(loaders)) == loaders
    assert _namespaces.loader_tree(loaders) is loaders
    assert not _namespaces._exists("no_such_package.part")
    assert not _namespaces._exists("no_such_package")
    assert _namespaces._exists(NAMESPACE)


def test_callbacks_that_watch_are_not_followed(tmp_path: Any) -> None:
    from vram_guard_lightning import VramGuard

    own = Ending()
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [VramGuard(budget="1GiB"), pl.callbacks.Timer(), own])
    assert _shadow.followed_callbacks(trainer) == [own]


@pytest.mark.parametrize(
    ("datamodule", "hook", "owner"),
    [(None, "on_before_batch_transfer", "module"), (Data, "on_before_batch_transfer", "data"),
     (Data, "on_after_batch_transfer", "module")],
)  # fmt: skip
def test_the_owner_of_a_transfer_hook_is_lightnings(datamodule: Any, hook: str, owner: str) -> None:
    data, module = None if datamodule is None else datamodule(), pl.LightningModule()
    found = _capture._hook_owner(SimpleNamespace(datamodule=data), module, hook)  # type: ignore[arg-type]
    assert found is (module if owner == "module" else data)


def test_a_batch_is_heard_while_somebody_listens() -> None:
    heard = _play.Heard()
    heard.step("batch", "output")
    assert (heard.batch, heard.output) == (None, None)
    heard.listening = True
    heard.step("batch", "output")
    assert (heard.batch, heard.output) == ("batch", "output")


def test_collections_of_loaders_are_read_as_one() -> None:
    """The longest data set counts, and what one loader says counts for all."""

    def loader(samples: int) -> Any:
        return DataLoader(TensorDataset(torch.ones(samples, 2)), 4)

    ready = DataLoader([torch.zeros(4, 2)] * 3, batch_size=None)  # type: ignore[arg-type]
    found = _sample.read([loader(8), loader(24)])
    assert (found.batch_size, found.dataset_size, found.growable) == (4, 24, "")
    assert [len(part[0]) for part in found.distinct(2)] == [2, 2]
    assert "ready batches" in _sample.read({"a": loader(8), "b": ready}).growable
    single = _sample.read({"a": loader(8)})
    assert list(single.make(3)) == ["a"]
    streams = _sample.read([DataLoader(cases.Stream(), 4), DataLoader(cases.Stream(), 4)])
    assert streams.dataset_size is None


def test_a_metric_called_several_times_has_a_copy_for_each_call() -> None:
    from torchmetrics import MeanMetric

    metric = MeanMetric()
    followed = _step_metrics._Followed(metric)
    first, second = followed.beside(), followed.beside()
    assert first is not second
    followed.calls = 0
    assert (followed.beside(), followed.beside()) == (first, second)
    assert len(followed.copies) == 2
    metric.update(torch.tensor(4.0))
    assert _step_metrics._empty_copy(metric).update_count == 0
    origin, other = _step_metrics.Origin(first, 0), _step_metrics.Origin(first, 1)
    assert origin.same(_step_metrics.Origin(first, 0))
    assert not any(origin.same(one) for one in (None, other, _step_metrics.Origin(second, 0)))


class OwnBackward(pl.LightningModule):  # type: ignore[misc, name-defined]
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None: ...


class Before(pl.Callback):  # type: ignore[misc, name-defined]
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None: ...


class OwnStrategy(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
    def post_backward(self, closure_loss: Any) -> None: ...


@pytest.mark.parametrize(
    ("module", "callback", "strategy", "said"),
    [
        (pl.LightningModule, None, None, ""),
        (OwnBackward, None, None, "backward of OwnBackward is overridden"),
        (pl.LightningModule, Before, None, "on_before_backward of Before"),
        (pl.LightningModule, None, OwnStrategy, "post_backward of OwnStrategy is overridden"),
    ],
)
def test_what_runs_with_every_backward_keeps_batches_whole(
    tmp_path: Any, module: Any, callback: Any, strategy: Any, said: str
) -> None:
    given = {} if strategy is None else {"strategy": strategy("cpu")}
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [] if callback is None else [callback()], **given)
    found = _hooks.why_whole(trainer, module())
    assert found.startswith(said)
    assert bool(found) == bool(said)
