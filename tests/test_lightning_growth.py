"""VramGuard(grow=True): a larger batch from the user's loader, learning rates scaled exactly once."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard_lightning import VramGuard, _namespaces

pytestmark = pytest.mark.filterwarnings("ignore", "error:vram_guard")
INSTALLED = [module.__name__ for module in _namespaces.installed()]
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
    return VramGuard(**{"budget": "64GiB", "grow": True, **settings})


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


@pytest.mark.parametrize(("rule", "rate"), [("sqrt", 0.02 * 8**0.5), ("none", 0.02)])
def test_other_rules(tmp_path: Any, rule: str, rate: float) -> None:
    assert fit(tmp_path, growing(lr_rule=rule)).rates == pytest.approx([rate] * 3)


@pytest.mark.parametrize("scheduler", ["one_cycle", "warmup_cosine", "lambda", "step_lr"])
def test_schedules_are_those_of_the_larger_batch_scaled(tmp_path: Any, scheduler: str) -> None:
    """As a run that was written with the larger batch, times the factor."""
    written = fit(tmp_path, None, cases.loader(SAMPLES, 64, shuffle=False), scheduler=scheduler)
    grown = fit(tmp_path, growing(), scheduler=scheduler)
    assert grown.rates == pytest.approx([8 * rate for rate in written.rates])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("scheduler", ["none", "one_cycle", "warmup_cosine", "lambda", "step_lr"])
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


def test_never_scaled_twice_over_a_resume(tmp_path: Any) -> None:
    checkpoint = importlib.import_module(INSTALLED[0]).callbacks.ModelCheckpoint

    def run(guard: Any, resume: Any = None, epochs: int = 4) -> Any:
        keep = checkpoint(dirpath=tmp_path / "saved", filename="{step}", save_top_k=-1, every_n_train_steps=1)
        how: dict[str, Any] = {"callbacks": [] if resume else [keep], "max_epochs": epochs}
        return fit(tmp_path, guard, scheduler="lambda", enable_checkpointing=True, ckpt_path=resume, **how)

    straight = run(growing())
    saved = str(tmp_path / "saved" / "step=2.ckpt")
    assert torch.load(saved, weights_only=True)["vram_guard"] == {
        "learning_rate_factor": 8.0,
        "batch_size": 64,
    }
    resumed = run(growing(), saved)
    assert resumed.rates == pytest.approx(straight.rates[2:])
    again = run(growing(lr_rule="none"), saved)
    assert again.rates == pytest.approx([rate / 8 for rate in straight.rates[2:]])
    reported = run(VramGuard(budget="64GiB", mode="report"), saved)
    assert reported.rates[0] == pytest.approx(straight.rates[2]), "report mode leaves restored rates alone"


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
    assert fit(tmp_path, growing(target_utilization=0.001), stream, max_epochs=1).loaded[0] > 8

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
