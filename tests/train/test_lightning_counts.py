"""What is counted of a training with Lightning before it begins is what Lightning counts while it runs."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.longest.planned_batch import LARGEST
from vram_guard_lightning import _capture, _job, _sample, _validation

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = cases.NAMESPACE
pl = importlib.import_module(NAMESPACE)
Base: Any = type(cases.make_module())


class Probe(pl.Callback):  # type: ignore[misc, name-defined]
    """Reads at the guard's point, and writes down what happens."""

    def __init__(self, read: Any) -> None:
        self.read, self.found = read, None
        self.epochs, self.samples, self.validations, self.batches = 0, 0, 0, None
        self.validated: Any = Counter()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        lightnings_own = trainer.strategy.setup

        def setup(trainer: Any) -> None:
            self.found = self.read(trainer)
            lightnings_own(trainer)

        trainer.strategy.setup = setup

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1
        self.batches, self.samples = trainer.num_training_batches, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.samples += len(batch[0])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validations += 1

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated[dataloader_idx] += 1


class Asking(Base):  # type: ignore[misc]
    """Asks how many steps there will be, as schedules do."""

    told = None

    def configure_optimizers(self) -> Any:
        self.told = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("samples", [40, 37])
@pytest.mark.parametrize(
    "how",
    [
        {"max_epochs": 1},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_epochs": 2, "limit_train_batches": 3},
        {"max_epochs": 2, "limit_train_batches": 1},
        {"max_epochs": 2, "limit_train_batches": 9},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"max_epochs": 3, "max_steps": 7},
        {"max_epochs": 3, "max_steps": 1},
        {"max_epochs": -1, "max_steps": 1},
        {"max_epochs": -1, "max_steps": 7, "accumulate_grad_batches": 2, "limit_train_batches": 4},
    ],
)
def test_epochs_batches_and_steps_are_as_many_as_the_trainer_runs(
    tmp_path: Any, how: dict[str, Any], samples: int
) -> None:
    data = cases.loader(samples, 8)

    def read(trainer: Any) -> Any:
        found = _sample.read(data)
        batches = _capture._batches_per_epoch(trainer, found)
        return (
            _job._epochs(trainer, batches),
            batches,
            _capture._stepping_batches(trainer, batches),
            _capture._epoch_samples(trainer, found),
        )

    probe, module = Probe(read), Asking()
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [probe], **how)
    trainer.fit(module, data)
    epochs, batches, steps, of_epoch = probe.found
    assert (epochs, batches, steps) == (probe.epochs, probe.batches, module.told)
    if trainer.is_last_batch:  # the last epoch is a whole one
        limited = isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches < 1
        assert of_epoch == (samples // 2 if limited else probe.samples)


def vectors(samples: int, batch_size: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, 6), torch.ones(samples, 2)), batch_size)


class Validating(Base):  # type: ignore[misc]
    """Takes batches of any collection of loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


@pytest.mark.parametrize("limit", [1.0, 0.5, 1, 3, 100])
@pytest.mark.parametrize("mode", ["sequential", "min_size", "max_size", "max_size_cycle"])
def test_a_validation_has_as_many_batches_as_the_trainer_runs(tmp_path: Any, mode: str, limit: float) -> None:
    combined = pl.utilities.combined_loader.CombinedLoader([vectors(40, 4), vectors(17, 4)], mode)

    def read(trainer: Any) -> Any:
        rounds = _validation.read_validation(trainer, LARGEST)
        return None if rounds is None else [one.batches for one in rounds.loaders]

    probe = Probe(read)
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [probe], max_epochs=1, limit_val_batches=limit)
    trainer.fit(Validating(), cases.loader(8, 8), combined)
    assert probe.found == [*probe.validated.values()]


@pytest.mark.parametrize(
    ("how", "validates"),
    [
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, True),
        ({"max_epochs": 2, "check_val_every_n_epoch": 3}, False),
        ({"max_epochs": 1, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 1}, True),
        ({"max_epochs": -1, "max_steps": 4, "check_val_every_n_epoch": 2}, True),
        ({"max_epochs": 1, "check_val_every_n_epoch": None, "val_check_interval": 2}, True),
        ({"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 2}, False),
        ({"max_epochs": 1, "limit_val_batches": 0.0}, False),
    ],
)
def test_a_validation_that_never_runs_is_not_read(tmp_path: Any, how: dict[str, Any], validates: bool) -> None:
    probe = Probe(lambda trainer: _validation.read_validation(trainer, LARGEST))
    trainer = cases.make_trainer(NAMESPACE, tmp_path, [probe], **how)
    trainer.fit(cases.make_module(), cases.loader(16, 8), cases.loader(16, 8, shuffle=False))
    assert (probe.validations > 0, probe.found is not None) == (validates, validates)


@pytest.mark.parametrize(
    ("settings", "most", "norm", "value"),
    [
        ({}, 1, None, None),
        ({"accumulate_grad_batches": 3}, 3, None, None),
        ({"callbacks": lambda: pl.callbacks.GradientAccumulationScheduler({0: 2, 4: 5, 8: 3})}, 5, None, None),
        ({"gradient_clip_val": 0.5}, 1, 0.5, None),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}, 1, 0.5, None),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, 1, None, 0.5),
        ({"gradient_clip_val": 0, "gradient_clip_algorithm": "value"}, 1, None, None),
    ],
)
def test_accumulation_and_clipping_are_the_trainers(
    tmp_path: Any, settings: dict[str, Any], most: int, norm: float | None, value: float | None
) -> None:
    callbacks = [settings.pop("callbacks")()] if "callbacks" in settings else []
    trainer = cases.make_trainer(NAMESPACE, tmp_path, callbacks, **settings)
    assert _capture.accumulation(trainer) == most
    assert (_capture._clipping(trainer, "norm"), _capture._clipping(trainer, "value")) == (norm, value)
