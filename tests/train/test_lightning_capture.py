"""From a Trainer and a LightningModule to a TrainingStep: the user's own code, followed without a trace left."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_cases as cases

from vram_guard.errors import DeviceMismatchError, UnsupportedStepError
from vram_guard.simulate import trace
from vram_guard_lightning import _capture

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = cases.NAMESPACE
pl = importlib.import_module(NAMESPACE)
Base: Any = type(cases.make_module())


def captured(root: Any, module: Any, data: Any = None, **how: Any) -> Any:
    """What is captured at the guard's point of a real fit, and its steps' timeline; the training itself runs on."""
    found = SimpleNamespace()

    class Probe(pl.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            lightnings_own = trainer.strategy.setup

            def setup(trainer: Any) -> None:
                found.capture = _capture.capture(trainer, pl_module)
                with found.capture.symbolic_run():
                    found.timeline = trace(found.capture.step.with_(job=None))
                lightnings_own(trainer)

            trainer.strategy.setup = setup

    trainer = cases.make_trainer(NAMESPACE, root, [Probe(), *how.pop("callbacks", ())], **{"max_steps": 2, **how})
    arguments = {"datamodule": data} if hasattr(data, "train_dataloader") else {}
    arguments = arguments or {"train_dataloaders": data if data is not None else cases.loader(40)}
    trainer.fit(module, **arguments)
    return found


def test_what_the_trainer_says_is_in_the_step(tmp_path: Any) -> None:
    step = captured(
        tmp_path,
        cases.make_module(),
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        precision="bf16-mixed",
        limit_train_batches=4,
    ).capture.step
    assert (step.precision, step.accumulate, step.zero_grad) == ("bf16-mixed", 3, "before_backward")
    assert (step.clip_grad_norm, step.clip_grad_value, step.data_parallel_ranks) == (0.5, None, 1)
    by_value = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    step = captured(tmp_path, cases.make_module(), **by_value).capture.step
    assert (step.clip_grad_norm, step.clip_grad_value) == (None, 0.5)
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 4: 5})
    assert captured(tmp_path, cases.make_module(), callbacks=[scheduler]).capture.step.accumulate == 5


def test_training_step_may_ask_for_anything(tmp_path: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Curious(Base):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.MeanSquaredError()
            self.history: list[Any] = []
            self.calls = 0

        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            assert len(self.trainer.train_dataloader) == self.trainer.num_training_batches == 5
            assert self.trainer.estimated_stepping_batches == 2
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.calls += 1
            assert isinstance(self.trainer, pl.Trainer)
            assert x.device == self.device == next(self.parameters()).device
            prediction = self.net(x)
            self.history.append(prediction)
            self.metric(prediction, y)
            self.log("metric", self.metric)
            self.log_dict({"rate": self.optimizers().param_groups[0]["lr"], "epoch": float(self.current_epoch)})
            self.logger.log_metrics({"direct": float(prediction.mean())}, step=self.global_step)
            self.print("")
            self.all_gather(prediction)
            return super().training_step(batch, batch_idx)

    module = Curious()
    logger = pl.loggers.CSVLogger(tmp_path)
    found = captured(tmp_path, module, logger=logger)
    assert found.timeline.tier == "symbolic"
    assert module.calls == 2, "the trace's calls are forgotten"
    assert len(module.history) == 2
    assert not any(tensor.is_meta for tensor in module.history)


@pytest.mark.parametrize(
    "how",
    [
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"max_epochs": -1, "max_steps": 2},
    ],
)
def test_configure_optimizers_is_told_how_long_the_training_is(tmp_path: Any, how: dict[str, Any]) -> None:
    """In the trace as afterwards by Lightning itself: schedules are made for so many steps."""
    told = tmp_path / "told.txt"

    class Asking(Base):
        def configure_optimizers(self) -> Any:
            with told.open("a") as out:
                out.write(f"{self.trainer.estimated_stepping_batches}\n")
            return super().configure_optimizers()

    captured(tmp_path, Asking(), **{"max_steps": -1, **how})
    in_the_trace, *others = told.read_text().split()
    assert others
    assert set(others) == {in_the_trace}


@pytest.mark.parametrize(
    "form",
    [
        lambda a, s: [a],
        lambda a, s: ([a], [s]),
        lambda a, s: {"optimizer": a, "lr_scheduler": {"scheduler": s}},
        lambda a, s: [{"optimizer": a}],
    ],
)
def test_every_form_of_configure_optimizers(tmp_path: Any, form: Any) -> None:
    class Returning(Base):
        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam(self.parameters())
            return form(adam, torch.optim.lr_scheduler.StepLR(adam, 1))

    timeline = captured(tmp_path, Returning()).timeline
    parameters = sum(parameter.nbytes for parameter in Base().parameters())
    kept = sum(
        block.bytes_at(8) for block in timeline.alive_at(len(timeline.events)) if "optimizer" in str(block.category)
    )
    assert kept >= 2 * parameters


def test_transfer_hooks_of_module_and_datamodule(tmp_path: Any) -> None:
    loaders = set()

    class Upscaling(Base):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            loaders.add(("after", dataloader_idx))
            x, y = batch
            return x.repeat(1, 100)[:, :6] * 1.0, y

    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return cases.loader(40)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            loaders.add(("before", dataloader_idx))
            return [part.double().float() for part in batch]

    plain = captured(tmp_path, cases.make_module()).timeline
    found = captured(tmp_path, Upscaling(), Data())
    hooked = found.timeline
    assert hooked.tier == "symbolic"
    assert len(hooked.blocks) > len(plain.blocks)
    assert len(found.capture.step.batch(2)[0]) == 2
    assert loaders == {("before", 0), ("after", 0)}


# --- the sample ---------------------------------------------------------------------------------------------


def test_a_training_step_that_fetches_for_itself_is_refused(tmp_path: Any) -> None:
    class Fetching(Base):
        def training_step(self, dataloader_iter: Any) -> Any:
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(UnsupportedStepError):
        captured(tmp_path, Fetching())


def test_a_lost_loss_is_refused_by_name(tmp_path: Any) -> None:
    class Silent(Base):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    with pytest.raises(UnsupportedStepError):
        captured(tmp_path, Silent())


def test_on_a_cpu_trainer_the_modules_own_tensors_are_on_the_device(tmp_path: Any) -> None:
    class Projecting(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not hasattr(self, "table"):
                self.table = torch.ones(2, 2)
            return torch.einsum("bi,ij->bj", self.net(batch[0]), self.table).sub(torch.ones(2)).square().mean()

    found = captured(tmp_path, Projecting())
    assert found.capture.step.device == "cpu"
    assert (found.timeline.tier, found.timeline.notes) == ("symbolic", ())
    with pytest.raises(DeviceMismatchError), found.capture.symbolic_run():
        trace(found.capture.step.with_(device="cuda"))


def test_pictures_for_the_logger_go_nowhere_during_the_trace(tmp_path: Any) -> None:
    written = tmp_path / "written.txt"

    def write(line: object) -> None:
        with written.open("a") as out:
            out.write(f"{line}\n")

    class Recorder(pl.loggers.logger.Logger):  # type: ignore[misc]
        name, version = "recorder", "0"
        experiment = SimpleNamespace(add_image=lambda name: write(name))

        def log_hyperparams(self, *_: Any) -> None:
            pass

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "own" in metrics:
                write(step)

    class Writing(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"own": 1.0}, step=self.global_step)
            self.logger.experiment.add_image("picture")
            return super().training_step(batch, batch_idx)

    found = captured(tmp_path, Writing(), logger=Recorder(), log_every_n_steps=1000)
    assert found.timeline.tier == "symbolic"
    assert written.read_text().split() == ["0", "picture", "1", "picture"]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """One that cannot be copied."""

    def __init__(self) -> None:
        self.lines = (line for line in "abc")

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.lines)


@pytest.mark.parametrize(
    "data",
    [
        lambda: torch.utils.data.DataLoader(Stream(), batch_size=4),
        lambda: {"a": cases.loader(40, 8), "b": cases.loader(40, 4)},
        lambda: iter([[torch.zeros(4, 2), torch.zeros(4)]]),
    ],
    ids=["stream", "sizes", "once"],
)
def test_loaders_that_are_refused(tmp_path: Any, data: Any) -> None:
    with pytest.raises(UnsupportedStepError):
        captured(tmp_path, cases.make_module(), data())


class Anew:
    """Iterable, and no DataLoader."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def test_loaders_of_ready_batches(tmp_path: Any) -> None:
    x, y = next(iter(cases.loader(40, 6)))
    for loader in (torch.utils.data.DataLoader([[x, y]] * 3, batch_size=None), Anew([[x, y]] * 3)):
        sample = captured(tmp_path, cases.make_module(), loader).capture.sample
        assert sample.batch_size == 6
        assert len(sample.make(9)[0]) == 9
        assert sample.growable


def test_collections_keep_their_structure(tmp_path: Any) -> None:
    class Several(Base):
        def unpack(self, batch: Any) -> Any:
            return super().unpack(batch["a"] if isinstance(batch, dict) else batch)

    combined = pl.utilities.combined_loader.CombinedLoader({"a": cases.loader(40), "b": [cases.loader(24)]})
    sample = captured(tmp_path, Several(), combined).capture.sample
    batch = sample.make(3)
    assert (sample.batch_size, sample.dataset_size) == (8, 40)
    assert len(batch["a"][0]) == len(batch["b"][0][0]) == 3
