"""VramGuard(grow=True): a larger batch from the user's loader, learning rates scaled exactly once."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases
from guard_arguments import in_advanced

from vram_guard.apply.learning_rate import SCHEDULER_ATTRIBUTES
from vram_guard.apply.saved_rates import divided_optimizer
from vram_guard_lightning import VramGuard

pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")
INSTALLED = cases.INSTALLED
SAMPLES = 64


def fit(root: Any, guard: Any, data: Any = None, *, scheduler: str = "none", ckpt_path: Any = None, **how: Any) -> Any:
    namespace = how.pop("namespace", INSTALLED[0])
    module = how.pop("module", None) or cases.make_module(namespace, scheduler=scheduler)
    callbacks = [*([guard] if guard else []), *how.pop("callbacks", ())]
    trainer = cases.make_trainer(namespace, root, callbacks, **how)
    torch.manual_seed(3)
    if data is None:
        data = cases.loader(SAMPLES, shuffle=False)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def growing(**settings: Any) -> VramGuard:
    """The data set is what limits it: from 8 to 64 samples, one step in an epoch."""
    return VramGuard(**in_advanced({"budget": "64GiB", "grow": True, **settings}))


@pytest.mark.parametrize("namespace", INSTALLED)
def test_batches_grow_and_rates_follow_linearly(tmp_path: Any, namespace: str) -> None:
    data = cases.loader(SAMPLES)
    guard = growing()
    module = fit(tmp_path, guard, data, namespace=namespace)
    assert module.loaded == [64, 64, 64]
    assert module.rates == pytest.approx([0.16] * 3)
    assert guard.plan is not None
    assert guard.plan.learning_rate_factor == 8
    assert data.batch_size == data.batch_sampler.batch_size == 8, "the user's own loader is as it was"


@pytest.mark.parametrize(
    ("scheduler", "optimizer"),
    [("none", "adamw"), ("one_cycle", "sgd"), ("lambda", "sgd")],
)
def test_a_grown_training_is_the_one_written_with_that_batch_and_rate(
    tmp_path: Any, scheduler: str, optimizer: str
) -> None:
    """Rates at every step and final weights are those of a run written with the larger batch and rate."""

    def module(scale: float) -> Any:
        return cases.make_module(INSTALLED[0], scheduler=scheduler, optimizer=optimizer, scale=scale)

    native = fit(tmp_path, None, cases.loader(SAMPLES, 64), module=module(8.0), max_epochs=10)
    guard = growing()
    grown = fit(tmp_path, guard, cases.loader(SAMPLES, 8), module=module(1.0), max_epochs=10)
    assert guard.plan is not None
    assert guard.plan.learning_rate_factor == 8
    assert grown.loaded == native.loaded == [64] * 10
    # A rate times 8 and a rate made from 8 times the base round differently in the last bit under some schedules.
    assert grown.rates == pytest.approx(native.rates, rel=1e-12)
    torch.testing.assert_close(cases.weights(grown), cases.weights(native), rtol=1e-6, atol=1e-7)


SCHEDULERS = ("one_cycle", "warmup_cosine", "plateau")


def saving(root: Any, guard: Any, scheduler: str) -> tuple[Any, Path]:
    """A run of four steps, and its checkpoint after two."""
    keep = importlib.import_module(INSTALLED[0]).callbacks.ModelCheckpoint(
        dirpath=root / "saved", filename="{step}", save_top_k=-1, every_n_train_steps=1
    )
    module = fit(root, guard, scheduler=scheduler, enable_checkpointing=True, callbacks=[keep], max_epochs=4)
    return module, root / "saved" / "step=2.ckpt"


def resumed_for_two_steps(root: Any, guard: Any, scheduler: str, saved: Path) -> list[float]:
    """As many as the grown run had left, so that its schedule does not end before."""
    grows = guard is not None and guard.settings.grow and not os.environ.get("VRAM_GUARD_DISABLE")
    limit = {} if grows else {"limit_train_batches": 1}
    rates: list[float] = fit(root, guard, scheduler=scheduler, ckpt_path=str(saved), max_epochs=4, **limit).rates
    assert len(rates) == 2
    return rates


def as_saved_before(path: Path) -> None:
    """As the guard's first releases wrote it: the rates as the run had them, and their factor."""
    content = torch.load(path, weights_only=False)
    content["optimizer_states"] = [divided_optimizer(one, 1 / 8) for one in content["optimizer_states"]]
    content["lr_schedulers"] = [times_eight(one) for one in content["lr_schedulers"]]
    content["vram_guard"] = {"learning_rate_factor": 8.0, "batch_size": 64}
    torch.save(content, path)


def times_eight(state: Any) -> Any:
    if isinstance(state, list):
        return [times_eight(one) for one in state]
    many = {name: state[name] for name in SCHEDULER_ATTRIBUTES if name in state}
    scaled = {
        name: [8 * one for one in value] if isinstance(value, list) else 8 * value for name, value in many.items()
    }
    if "_schedulers" in state:
        scaled["_schedulers"] = times_eight(state["_schedulers"])
    return {**state, **scaled}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_checkpoint_of_a_grown_run_holds_the_rates_as_written(
    tmp_path: Any, scheduler: str, monkeypatch: Any
) -> None:
    """Resumed in every mode, with the guard off and without it: the rates as written, or scaled once."""
    straight, saved = saving(tmp_path, growing(), scheduler)
    content = torch.load(saved, weights_only=True)
    assert content["vram_guard"] == {"learning_rate_factor": 1.0, "multiplied_by": 8.0, "batch_size": 64}

    def resumed(guard: Any) -> list[float]:
        return resumed_for_two_steps(tmp_path, guard, scheduler, saved)

    grown = resumed(growing())
    if scheduler != "plateau":  # resumed within an epoch, Lightning leaves out the step that its end brings
        assert grown == pytest.approx(straight.rates[2:], rel=1e-12)
    written = [rate / 8 for rate in grown]
    assert resumed(None) == pytest.approx(written, rel=1e-12)
    if scheduler != SCHEDULERS[0]:  # who resumes it is nothing to the scheduler
        return
    for mode in ("report", "strict"):
        assert resumed(VramGuard(budget="64GiB", mode=mode)) == pytest.approx(written, rel=1e-12)
    assert resumed(VramGuard(budget="64GiB")) == pytest.approx(written, rel=1e-12)
    assert resumed(growing(lr_rule="none")) == pytest.approx(written, rel=1e-12)
    monkeypatch.setenv("VRAM_GUARD_DISABLE", "1")
    assert resumed(growing()) == pytest.approx(written, rel=1e-12)


def test_a_checkpoint_whose_rates_contain_the_factor(tmp_path: Any, monkeypatch: Any) -> None:
    """As the first releases wrote it: divided where rates may be changed, and a warning by what factor elsewhere."""
    scheduler = "warmup_cosine"
    straight, saved = saving(tmp_path, growing(), scheduler)
    as_saved_before(saved)
    grown, written = straight.rates[2:], [rate / 8 for rate in straight.rates[2:]]

    def resumed(guard: Any) -> list[float]:
        return resumed_for_two_steps(tmp_path, guard, scheduler, saved)

    assert resumed(growing()) == pytest.approx(grown, rel=1e-12)
    assert resumed(VramGuard(budget="64GiB")) == pytest.approx(written, rel=1e-12)
    for mode in ("report", "strict"):
        with pytest.warns(UserWarning, match="are 8 times those that were written"):
            assert resumed(VramGuard(budget="64GiB", mode=mode)) == pytest.approx(grown, rel=1e-12)
    monkeypatch.setenv("VRAM_GUARD_DISABLE", "1")
    with pytest.warns(UserWarning, match="are 8 times those that were written"):
        assert resumed(growing()) == pytest.approx(grown, rel=1e-12)


def test_datamodules_iterable_datasets_and_collections(tmp_path: Any) -> None:
    pl = importlib.import_module(INSTALLED[0])

    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return cases.loader(SAMPLES)

    module = cases.make_module()
    trainer = cases.make_trainer(INSTALLED[0], tmp_path, [growing()], max_epochs=1)
    trainer.fit(module, datamodule=Data())
    assert module.loaded == [64]

    stream = cases.loader(dataset=cases.Stream(SAMPLES), shuffle=False)
    assert fit(tmp_path, growing(target_utilization=0.00035), stream, max_epochs=1).loaded[0] > 8

    pair = {"a": cases.loader(SAMPLES), "b": cases.loader(SAMPLES)}
    assert fit(tmp_path, growing(), pair, max_epochs=1).loaded == [128]


def test_settings_that_count_batches_keep_their_samples(tmp_path: Any) -> None:
    class Validated(type(cases.make_module())):  # type: ignore[misc]
        pass

    module = Validated()
    trainer = cases.make_trainer(
        INSTALLED[0], tmp_path, [growing(target_utilization=0.9)], val_check_interval=8, limit_train_batches=8
    )
    trainer.fit(module, cases.loader(SAMPLES), cases.loader(16, shuffle=False))
    assert trainer.global_step == 3
    assert module.validated_at == [1, 2, 3]
    assert (trainer.val_check_interval, trainer.limit_train_batches) == (8, 8)


def test_what_counts_steps_is_named_or_rescaled(tmp_path: Any, capsys: Any) -> None:
    callbacks = importlib.import_module(INSTALLED[0]).callbacks

    class Stepwise(type(cases.make_module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=0.01)
            lr = torch.optim.lr_scheduler
            warm = lr.LinearLR(made, 0.1, total_iters=5)
            schedule = lr.SequentialLR(made, [warm, lr.MultiStepLR(made, [100, 200])], milestones=[5])
            return [made], [{"scheduler": schedule, "interval": "step"}]

    keep = callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=100)
    trainer = cases.make_trainer(INSTALLED[0], tmp_path, [growing(), keep], enable_checkpointing=True,
                                 log_every_n_steps=16, min_steps=2)  # fmt: skip
    logged_every = []
    module = Stepwise()
    module.on_train_start = lambda: logged_every.append(trainer.log_every_n_steps)
    trainer.fit(module, cases.loader(SAMPLES))
    said = " ".join(capsys.readouterr().out.split())
    assert logged_every == [2]
    assert trainer.log_every_n_steps == 16, "the Trainer is given back as it was"
    assert "log_every_n_steps counts larger batches: 16 -> 2" in said
    assert "steps of 8 times as many samples: min_steps = 2, ModelCheckpoint.every_n_train_steps = 100" in said
    assert "MultiStepLR (milestones 100, 200)" in said
    assert "LinearLR (total_iters 5)" in said


def test_a_checkpoint_of_smaller_batches_keeps_its_horizon_and_that_is_said(tmp_path: Any, capsys: Any) -> None:
    _straight, saved = saving(tmp_path, None, "one_cycle")
    capsys.readouterr()
    how: dict[str, Any] = {"scheduler": "one_cycle", "ckpt_path": str(saved), "max_epochs": 4}
    fit(tmp_path, growing(), **how)
    said = " ".join(capsys.readouterr().out.split())
    assert "run with batches of 8 samples, this one has 64" in said
    assert "OneCycleLR (total_steps 32)" in said


def test_loaders_that_cannot_grow_are_refused_with_the_reason(tmp_path: Any, capsys: Any) -> None:
    ready = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(5)]
    data = torch.utils.data.DataLoader(ready, batch_size=None)
    module = fit(tmp_path, growing(), data, max_epochs=1)
    assert module.loaded == [8] * 5
    assert "batch_size=None" in capsys.readouterr().out

    class Chunks(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from (list(range(start, start + 8)) for start in range(0, 40, 8))

        def __len__(self) -> int:
            return 5

    data = torch.utils.data.DataLoader(cases.Vectors(40), batch_sampler=Chunks())
    module = fit(tmp_path, growing(), data, max_epochs=1)
    assert module.loaded == [8] * 5
    assert "batch sampler Chunks has no batch_size" in capsys.readouterr().out


def test_learning_rate_finder_is_not_doubled(tmp_path: Any, capsys: Any) -> None:
    finder = importlib.import_module(INSTALLED[0]).callbacks.LearningRateFinder

    class Tunable(type(cases.make_module())):  # type: ignore[misc]
        lr = 0.02

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Tunable()
    fit(
        tmp_path,
        growing(),
        module=module,
        callbacks=[finder(num_training_steps=10, early_stop_threshold=None)],
    )
    assert module.loaded[-1] == 64
    assert module.rates[-1] == pytest.approx(module.lr)
    assert "LearningRateFinder" in capsys.readouterr().out


@pytest.mark.parametrize(("rule", "rate"), [("sqrt", 0.02 * 8**0.5), ("none", 0.02)])
def test_other_rules(tmp_path: Any, rule: str, rate: float) -> None:
    assert fit(tmp_path, growing(lr_rule=rule)).rates == pytest.approx([rate] * 3)


def test_saving_changes_nothing_of_the_run(tmp_path: Any) -> None:
    """Rates that are tensors, and the schedulers' own lists, stay the run's."""

    class Tensors(type(cases.make_module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            made = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.02))
            return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5), "interval": "step"}]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(float(optimizer.param_groups[0]["lr"]))

    keep = importlib.import_module(INSTALLED[0]).callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1
    )
    module = fit(tmp_path, growing(), module=Tensors(), callbacks=[keep], enable_checkpointing=True, max_epochs=4)
    assert module.rates == pytest.approx([0.16, 0.08, 0.04, 0.02])
    content = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert float(content["optimizer_states"][0]["param_groups"][0]["lr"]) == pytest.approx(0.02 / 4)
