"""The whole job of a Trainer: validation, checkpoints and later epochs, told before the first step."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("lightning")

import lightning_cases as cases
from each import each
from guard_arguments import in_advanced

from vram_guard.errors import DoesNotFitError
from vram_guard.guard import evaluation
from vram_guard.guard.refusals import undone_later
from vram_guard.plan.descriptions import Why
from vram_guard.simulate import trace_at
from vram_guard.step import TrainingStep
from vram_guard.techniques import Recipe
from vram_guard_lightning import VramGuard, _capture

pytestmark = pytest.mark.filterwarnings("ignore")
NAMESPACE = cases.NAMESPACE
pl = importlib.import_module(NAMESPACE)

WIDTH, SIZE = 256, 8
#: Lightning keeps a copy of the loss beside its graph, for hooks and progress bars; a plain step does not.
LOSS_COPY = 512


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A backbone and a head; only what is not frozen is given to the optimizer."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
        self.head = nn.Linear(2048, 4)
        self.backbone.requires_grad_(not frozen)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.backbone(batch[0].flatten(0, -2))).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head(self.backbone(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([one for one in self.parameters() if one.requires_grad])


def loader(samples: int = 32, batch_size: int = SIZE, *shape: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, *(shape or (1,)), WIDTH)), batch_size)


def told(root: Any, module: Any, *callbacks: Any, data: Any = None, validation: Any = None, **how: Any) -> Any:
    """The Trainer's capture at the guard's point, the prediction of the whole job, and that of two plain steps."""
    found = SimpleNamespace()

    class StoppedError(Exception):
        pass

    class Probe(pl.Callback):  # type: ignore[misc, name-defined]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            def setup(trainer: Any) -> None:
                found.capture = _capture.capture(trainer, pl_module)
                with found.capture.symbolic_run():
                    found.job = trace_at(found.capture.step, SIZE)
                    found.plain = trace_at(found.capture.step.with_(job=None), SIZE).at(SIZE)
                found.estimate = found.job.at(SIZE)
                raise StoppedError

            trainer.strategy.setup = setup

    checkpoint = how.pop("ckpt_path", None)
    trainer = cases.make_trainer(NAMESPACE, root, [Probe(), *callbacks], **{"max_epochs": 4, **how})
    arguments = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {}
    with pytest.raises(StoppedError):
        trainer.fit(
            module,
            **arguments or {"train_dataloaders": data or loader(), "val_dataloaders": validation},
            ckpt_path=checkpoint,
        )
    return found


def peaks(found: Any) -> dict[tuple[str, str], int]:
    """The allocated peak of each phase."""
    return {(phase.name, phase.label): phase.peak_allocated for phase in found.estimate.phases}


def rounded(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's block."""
    return -(-tensor.nbytes // 512) * 512


# --- later epochs -----------------------------------------------------------------------------------------


class Unfreezing(pl.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class ByHook(Net):
    """Unfreezes by its own hook, and has its optimizer made anew."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.backbone.requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)


class AtTheEnd(pl.Callback):  # type: ignore[misc, name-defined]
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters())})


class ByStep(pl.Callback):  # type: ignore[misc, name-defined]
    """Knows the parameters themselves, since setup."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.layers = [pl_module.backbone]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step >= 8:
            for layer in self.layers:
                layer.requires_grad_(True)
            trainer.strategy.setup_optimizers(trainer)


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [
        (Net, [Unfreezing()]),
        (lambda: ByHook(frozen=True), []),
        (lambda: Net(frozen=True), [AtTheEnd()]),
        (lambda: Net(frozen=True), [ByStep()]),
    ],
    ids=["BaseFinetuning", "hook", "end of an epoch", "by global_step"],
)
def test_a_backbone_that_is_unfrozen_later_is_told_at_once(tmp_path: Any, module: Any, callbacks: Any) -> None:
    found = told(tmp_path, module(), *callbacks)
    later = peaks(found)["training", "epoch 2"]
    assert found.plain.peak_allocated < 0.4 * later
    assert found.estimate.peak_reserved > 2 * found.plain.peak_reserved
    unfrozen = told(tmp_path, Net()).plain  # the same step, with everything trained from the start
    # A group of weights of its own is updated by itself, and so are the temporaries of its update.
    groups = 2 * sum(rounded(one) for one in Net().head.parameters())
    assert 0 <= unfrozen.peak_allocated + LOSS_COPY - later <= groups
    assert [phase.label for phase in found.estimate.phases if phase.label] == ["epoch 2"]


def test_a_datamodule_with_larger_batches_later(tmp_path: Any) -> None:
    class Growing(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader(4096, 2048 if self.trainer.current_epoch == 2 else SIZE)

    found = told(tmp_path, Net(), data=Growing(), reload_dataloaders_every_n_epochs=1)
    larger = trace_at(found.capture.step.with_(job=None), 2048).at(2048)
    later = peaks(found)["training", "epoch 2"]
    assert later == larger.peak_allocated + LOSS_COPY > 1.5 * found.plain.peak_allocated
    cut = found.capture.step.with_(whole_batch=True, accumulate=2)
    with found.capture.symbolic_run():
        phases = trace_at(cut, SIZE // 2).at(SIZE // 2).phases
    halves = {phase.label: phase for phase in phases if phase.name == "training"}
    assert "epoch 3" not in halves  # which is like the first
    # Micro-batches keep their size, also where they are cut of a larger batch: that alone takes more.
    more = 2048 * WIDTH * 4 - SIZE * WIDTH * 4
    assert halves["epoch 2"].peak_allocated - halves[""].peak_allocated == more


class Widening(Net):
    """Its step takes more rows from an epoch, or a step, on."""

    def __init__(self, wider: Any) -> None:
        super().__init__()
        self.wider = wider

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].flatten(0, -2)
        return self.head(self.backbone(rows.repeat(512, 1) if self.wider(self) else rows)).square().mean()


@pytest.mark.parametrize(
    "wider",
    [
        lambda net: net.current_epoch >= 6,
        lambda net: net.trainer.global_step > 23,
        lambda net: net.current_epoch == 6 and net.global_step,
    ],
)
def test_a_step_that_asks_for_the_epoch_is_followed_where_that_decides(tmp_path: Any, wider: Any) -> None:
    found = told(tmp_path, Widening(wider), max_epochs=12)
    later = {label: peak for (name, label), peak in peaks(found).items() if name == "training"}
    assert later["epoch 6"] > 1.5 * found.plain.peak_allocated
    assert len(later) <= 3  # the first steps, and each that differs once
    assert not peaks(told(tmp_path, Net(), max_epochs=12))


def test_steps_that_decide_nothing_new_are_passed_over_on_the_way_to_a_later_one(tmp_path: Any) -> None:
    module = Widening(lambda net: net.global_step == 20 * 64 + 30)
    found = told(tmp_path, module, data=loader(64 * SIZE), max_epochs=24)
    assert peaks(found)["training", "global_step 1310"] > 1.5 * found.plain.peak_allocated
    assert not [note for note in found.job.notes if "followed up to" in note.message]


class Momentum(pl.Callback):  # type: ignore[misc, name-defined]
    """Gives plain SGD a momentum, and with that a state of every weight."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.optimizers[0].param_groups[0]["momentum"] = 0.9


class Switch(pl.Callback):  # type: ignore[misc, name-defined]
    """Has the module's step take more rows from a step on."""

    def __init__(self, at_step: int, hook: str) -> None:
        self.at_step = at_step
        self.switches = hook

    def _switch(self, hook: str, trainer: Any, module: Any) -> None:
        if hook == self.switches and trainer.global_step >= self.at_step:
            module.wide = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._switch("epoch", trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._switch("start", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].dim() == 0
        self._switch("end", trainer, pl_module)


class Switched(Widening):
    def __init__(self) -> None:
        super().__init__(lambda net: net.wide)
        self.wide = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize(
    ("callback", "label", "why"),
    [
        (Momentum(), "epoch 2", "optimizer.momentum"),
        (Switch(8, "epoch"), "epoch 2", "wide"),
        (Switch(9, "start"), "global_step 9", "wide"),
        (Switch(9, "end"), "global_step 9", "wide"),
    ],
    ids=["momentum", "an attribute", "before a step", "after a step"],
)
def test_what_a_callback_switches_on_later_is_told(tmp_path: Any, callback: Any, label: str, why: str) -> None:
    found = told(tmp_path, Switched(), callback)
    (note,) = [note.message for note in found.job.notes]
    assert note == f"from {label} on the step differs: {why}"
    grows = sum(rounded(one) for one in Net().parameters()) // (1 if why == "optimizer.momentum" else 8)
    assert peaks(found)["training", label] >= found.plain.peak_allocated + grows
    assert ("loss" in found.job.later_changes) is (why == "wide")


class Collecting(Net):
    """Keeps and counts what its steps make until the epoch is over; its rates begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanSquaredError()
        self.last: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = self.head(self.backbone(batch[0].flatten(0, -2)))
        self.log("error", self.accuracy(self.last, torch.zeros_like(self.last)), on_epoch=True)
        self.outputs.append(self.last.detach())
        return self.last.square().mean()

    def on_train_epoch_end(self) -> None:
        self.outputs.clear()
        self.accuracy.reset()
        self.last = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4)]


def test_what_steps_collect_and_rates_that_rise_make_no_other_step(tmp_path: Any) -> None:
    found = told(tmp_path, Collecting(), validation=loader())
    assert not [note for note in found.job.notes if "differs" in note.message]
    assert [phase.label for phase in found.estimate.phases if phase.label] == []


def test_weights_that_are_averaged(tmp_path: Any) -> None:
    found = told(tmp_path, Net(), pl.callbacks.EMAWeightAveraging())
    copy = sum(one.nbytes for one in Net().parameters())
    assert found.estimate.peak_allocated >= found.plain.peak_allocated + copy
    swa = pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=3, device=None)
    found = told(tmp_path, Net(), swa)
    assert peaks(found)["training", "epoch 2"] >= found.plain.peak_allocated + copy  # swa_epoch_start counts from one
    assert peaks(found)["training", ""] < found.plain.peak_allocated + copy
    assert (found.job.tier, swa._average_model.head.weight.device.type) == ("symbolic", "cpu")


def test_a_hook_that_cannot_be_followed_is_said(tmp_path: Any) -> None:
    class Failing(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise ValueError("no loss was collected")

    found = told(tmp_path, Net(), Failing(), Unfreezing())
    notes = [note.message for note in found.job.notes]
    assert [note for note in notes if "on_train_epoch_end" in note and "no loss was collected" in note] == notes[:1]
    assert [note for note in notes if "epoch 2" in note and "4 more parameters are trained" in note] == notes[1:]
    assert ("training", "epoch 2") in peaks(found)


class Measuring(Net):
    """Looks at copies of its gradients before each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        copies = [one.grad.clone() for one in self.parameters() for _copy in range(8)]
        assert copies


def test_what_hooks_around_steps_take_is_counted(tmp_path: Any) -> None:
    copies = 8 * sum(one.nbytes for one in Net().parameters())
    weights_and_states = 4 * copies // 8  # weights, gradients, two averages
    found = told(tmp_path, Measuring())
    assert found.estimate.peak_allocated >= weights_and_states + copies > found.plain.peak_allocated
    assert not found.job.notes


# --- validation -------------------------------------------------------------------------------------------


def test_validation_may_take_more_than_training(tmp_path: Any) -> None:
    found = told(tmp_path, Net(), validation=loader(16384, 8192), num_sanity_val_steps=2)
    assert found.estimate.peak_phase.name == "validation"
    assert found.estimate.peak_reserved > 1.2 * found.plain.peak_reserved


@each(
    ("how", "validates"),
    [
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, True),
        ({"max_epochs": 2, "check_val_every_n_epoch": 3}, False),
        ({"max_epochs": 1, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 1}, True),
        ({"max_epochs": -1, "max_steps": 8, "check_val_every_n_epoch": 2}, True),
        ({"max_epochs": 1, "check_val_every_n_epoch": None, "val_check_interval": 2}, True),
        ({"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 2}, False),
    ],
)
def test_a_validation_that_never_runs_is_not_predicted(tmp_path: Any, how: dict[str, Any], validates: bool) -> None:
    found = told(tmp_path, Net(), validation=loader(), **{"num_sanity_val_steps": 0, **how})
    assert (("validation", "") in peaks(found)) is validates


def test_outputs_are_collected_over_all_batches(tmp_path: Any) -> None:
    class Collecting(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self.backbone(batch[0]))

        def on_validation_epoch_end(self) -> None:
            torch.cat(self.outputs)
            self.outputs.clear()

    few, many = (told(tmp_path, Collecting(), validation=loader(512 * count, 512)) for count in (4, 10))
    grows = peaks(many)["validation", ""] - peaks(few)["validation", ""]
    assert grows == 6 * 512 * 2048 * 4 * 2  # the list, and what it is concatenated into


def test_a_validation_without_an_end_is_bounded(tmp_path: Any) -> None:
    class Endless(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            while True:
                yield (torch.ones(1, WIDTH),)

    found = told(tmp_path, Net(), validation=DataLoader(Endless(), 4))
    assert any("has no length" in note for note in found.capture.notes)
    assert ("validation", "") in peaks(found)
    bounded = told(tmp_path, Net(), validation=DataLoader(Endless(), 4), limit_val_batches=7)
    assert not any("has no length" in note for note in bounded.capture.notes)


def test_validation_that_cannot_be_followed_is_said_and_the_steps_are_predicted(tmp_path: Any) -> None:
    class Odd(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise NotImplementedError("an exotic kernel")

    found = told(tmp_path, Odd(), validation=loader(), num_sanity_val_steps=1)
    notes = [note.message for note in found.job.notes]
    assert [note.partition(" (")[0] for note in notes] == [
        "the sanity check cannot be followed to its end",
        "validation cannot be followed to its end",
    ]
    assert peaks(found)["training", ""] == found.plain.peak_allocated + LOSS_COPY

    class Unreadable(Net):
        def val_dataloader(self) -> Any:
            raise OSError("no such folder")

    found = told(tmp_path, Unreadable())
    assert any("no such folder" in note for note in found.capture.notes)
    assert found.estimate.peak_reserved == found.plain.peak_reserved


# --- checkpoints ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_copies_on_the_gpu(tmp_path: Any) -> None:
    class Copying(Net):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["mine"] = {name: one.clone() for name, one in checkpoint["state_dict"].items()}

    own = {"enable_checkpointing": True}
    plain, copying = told(tmp_path, Net(), **own), told(tmp_path, Copying(), **own)
    copy = sum(rounded(one) for one in Net().parameters())
    assert peaks(copying)["saving", ""] == peaks(plain)["saving", ""] + copy
    assert ("saving", "") not in peaks(told(tmp_path, Copying()))
    assert not list(tmp_path.rglob("*.ckpt"))


def test_states_of_a_checkpoint_are_there_before_the_first_step(tmp_path: Any) -> None:
    trainer = cases.make_trainer(NAMESPACE, tmp_path, max_epochs=1)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    found = told(tmp_path, Net(), ckpt_path=tmp_path / "first.ckpt")
    weights = sum(rounded(one) for one in Net().parameters())
    # And Adam's two averages; its counters stay on the host. Lengths of loaders are compared on the GPU.
    assert 3 * weights <= peaks(found)["resuming", ""] <= 3 * weights + 2 * 512

    trainer = cases.make_trainer(NAMESPACE, tmp_path, [Unfreezing()], max_epochs=2)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    found = told(tmp_path, Net(), Unfreezing(), ckpt_path=tmp_path / "second.ckpt")
    assert found.capture.trainer.current_epoch == 0
    assert found.estimate.peak_allocated > 2 * found.plain.peak_allocated  # its first epoch is number 2


# --- test and predict -------------------------------------------------------------------------------------


class Judged(Net):
    """Keeps what it computes until its test is over."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.backbone(batch[0]))
        self.log("mean", self.outputs[-1].mean())

    def on_test_epoch_end(self) -> None:
        torch.cat(self.outputs)
        self.outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.backbone(batch[0]))


def evaluated(root: Any, module: Any, *rows: int, stage: str = "test", **guard: Any) -> Any:
    """What the guard has said, what was predicted, and what the Trainer's function has returned."""
    torch.manual_seed(0)
    found: list[Any] = []

    def foresee(*args: Any) -> Any:
        found.append(evaluation.foresee(*args))
        return found[-1]

    callbacks = [VramGuard(**in_advanced({"margin": 0, "remember": False, **guard}))] if guard else []
    trainer = cases.make_trainer(NAMESPACE, root, callbacks)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        patch.setattr("vram_guard_lightning._callback.foresee", foresee)
        warnings.simplefilter("always")
        returned = getattr(trainer, stage)(module, loader(*rows), **({"verbose": False} if stage == "test" else {}))
    said = [str(one.message) for one in warned if "vram_guard" in str(one.message)]
    return SimpleNamespace(said=said, predicted=found[0] if found else None, returned=returned)


def test_a_test_and_a_prediction_are_told_before_they_begin(tmp_path: Any) -> None:
    few, many = (evaluated(tmp_path, Judged(), 512 * count, 512, budget="1GiB").predicted for count in (20, 50))
    grows = many.estimate.peak_allocated - few.estimate.peak_allocated
    assert grows == 30 * 512 * 2048 * 4 * 2  # the list, and what it is concatenated into
    assert [(phase.name) for phase in few.estimate.phases] == ["setup", "test"]
    predicted = evaluated(tmp_path, Judged(), 4096, 1024, stage="predict", budget="1GiB")
    own = Judged()
    batch = next(iter(loader(1024, 1024)))
    rounds = TrainingStep(own, batch, lambda net, batch: own.predict_step(batch, 0), keeps="nothing")
    alone = trace_at(rounds, 1024).at(1024)
    assert predicted.predicted.estimate.peak_allocated == alone.peak_allocated  # predictions wait on the host
    plain = evaluated(tmp_path, Judged(), 4096, 1024, stage="predict")
    assert [one.shape for one in plain.returned] == [one.shape for one in predicted.returned]


def test_a_prediction_that_does_not_fit_is_told_and_left_as_it_is(tmp_path: Any) -> None:
    short = {"stage": "predict", "budget": "80MiB"}
    found = evaluated(tmp_path, Judged(), 4096, 4096, **short)
    assert 0 < found.predicted.smaller < 4096
    assert [len(one) for one in found.returned] == [4096]
    smaller = evaluated(tmp_path, Judged(), 4096, found.predicted.smaller, **short)
    assert (smaller.predicted.fits, smaller.said) == (True, [])
    with pytest.raises(DoesNotFitError, match=r"trainer\.predict"):
        evaluated(tmp_path, Judged(), 4096, 4096, mode="strict", **short)
    assert evaluated(tmp_path, Judged(), 4096, 4096, whole_job=False, **short).predicted is None


class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    """Its test has rows only once it is set up for it."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.stages: list[str] = []
        self.rows, self._tested = 0, rows

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        if stage == "test":
            self.rows = self._tested

    def train_dataloader(self) -> Any:
        return loader()

    def test_dataloader(self) -> Any:
        return loader(self.rows, self.rows // 4)


def test_a_test_that_comes_after_the_training_is_told_before_it(tmp_path: Any, capsys: Any) -> None:
    """Where the script calls it below ``fit``, and its loader is known."""

    def made(**guard: Any) -> Any:
        guarded = VramGuard(**in_advanced({"margin": 0, "remember": False, "budget": "1GiB", **guard}))
        return cases.make_trainer(NAMESPACE, tmp_path, [guarded], max_epochs=1)

    def said() -> list[str]:
        return [one for one in capsys.readouterr().out.splitlines() if one.startswith("vram_guard: trainer.")]

    trainer, data = made(), Data()
    trainer.fit(Judged(), datamodule=data)
    (before,) = said()
    assert before.startswith("vram_guard: trainer.test fits: ")
    assert (data.stages, data.rows) == (["fit"], 0)  # what was looked at was looked at in a copy
    trainer.test(Judged(), datamodule=data)
    assert said() == [before]
    strict = made(budget="150MiB", mode="strict")

    def short() -> None:
        strict.fit(Judged(), datamodule=Data(2**15))
        strict.test(Judged())

    with pytest.raises(DoesNotFitError, match=r"trainer\.test"):
        short()
    made().fit(Judged(), datamodule=Data())  # nothing comes after it
    assert not said()


# --- nothing is left behind -------------------------------------------------------------------------------


def test_the_training_after_it_is_the_same(tmp_path: Any) -> None:
    def trained(*first: Any) -> torch.Tensor:
        torch.manual_seed(0)
        module, swa = Net(), pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=3)
        data = DataLoader(TensorDataset(torch.randn(32, 1, WIDTH)), SIZE, shuffle=True)
        trainer = cases.make_trainer(
            NAMESPACE, tmp_path, [*first, Unfreezing(), swa], max_epochs=4, num_sanity_val_steps=2
        )
        trainer.fit(module, data, loader())
        return cases.weights(module)

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            own = trainer.strategy.setup

            def setup(trainer: Any) -> None:
                before = dict(vars(trainer)), [dict(vars(one)) for one in trainer.callbacks]
                captured = _capture.capture(trainer, pl_module)
                with captured.symbolic_run():
                    trace_at(captured.step, SIZE)
                assert before == (dict(vars(trainer)), [dict(vars(one)) for one in trainer.callbacks])
                assert (trainer.current_epoch, trainer.global_step) == (0, 0)
                own(trainer)

            trainer.strategy.setup = setup

    assert torch.equal(trained(), trained(Looking()))


# --- the guard --------------------------------------------------------------------------------------------


def test_a_plan_is_made_for_the_epoch_that_takes_most(tmp_path: Any) -> None:
    def guarded(**settings: Any) -> VramGuard:
        guard = VramGuard(**in_advanced({"margin": 0, "remember": False, "recover": False, **settings}))
        trainer = cases.make_trainer(NAMESPACE, tmp_path, [guard, Unfreezing()], max_epochs=3)
        trainer.fit(Net(), loader(1024, 1024))
        assert guard.plan is not None
        return guard

    needs = guarded(budget="1GiB", mode="report").plan.before.peak_reserved
    short = {"budget": needs - 20 * 2**20, "allow": ["accumulate"]}
    plan = guarded(**short, mode="fit").plan
    assert (plan.fits, plan.changed, plan.before.fits(plan.budget)) == (True, True, False)
    assert [phase.label for phase in plan.estimate.phases if phase.label] == ["epoch 2"]
    alone = guarded(**short, mode="report", whole_job=False).plan
    assert not alone.changed  # the first epoch's step alone
    assert alone.reason_values[-1].kind is Why.JOB_LEFT_OUT


def test_what_a_later_epoch_undoes_is_not_planned(tmp_path: Any) -> None:
    def refused(found: Any, **recipe: Any) -> str:
        plan = SimpleNamespace(recipe=Recipe(**recipe), timeline=None, timeline_before=found.job)
        found = undone_later(plan)
        return "" if found is None else found.technique

    found = told(tmp_path, Net(), Unfreezing())
    assert refused(found, frozen_on_host=("backbone",), optimizer_on_host=True) == "offload_frozen"
    assert refused(found, optimizer_on_host=True) == "offload_optimizer"
    assert refused(told(tmp_path, Net(), validation=loader()), optimizer_on_host=True) == ""


class Keeping(Net):
    """Appends an output of every step to a list."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.head(self.backbone(batch[0].flatten(0, -2)))
        self.outputs.append(outputs.detach())
        loss = outputs.square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


@pytest.mark.parametrize(("manual", "epochs", "validates"), [(False, 4, False), (True, 1, True)])
def test_what_every_training_step_keeps_is_told(tmp_path: Any, manual: bool, epochs: int, validates: bool) -> None:
    found = told(tmp_path, Keeping(manual=manual), validation=loader() if validates else None, max_epochs=epochs)
    (leak,) = found.estimate.leaks
    assert (leak.bytes_per_step, leak.kept_in.rpartition(".")[2]) == (512, "outputs")  # the least block
    assert found.estimate.steps == 4 * epochs


class Logging(Net):
    """Logs values whose sums Lightning makes anew in every epoch, and skips what it is told to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for number in range(3):
            self.log(f"loss{number}", loss.detach())
        return loss


def test_what_is_logged_does_not_grow(tmp_path: Any) -> None:
    found = told(tmp_path, Logging(), validation=loader(), max_steps=10**6)
    assert (found.estimate.leaks, found.job.growth) == ((), ())


def test_batches_that_are_passed_over_end_an_epoch_and_not_the_look(tmp_path: Any) -> None:
    class Skipping(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch >= 2 else None

    class Sparing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    for module in (Skipping(), Sparing()):
        found = told(tmp_path, module, Unfreezing(), validation=loader())
        labels = {phase.label for phase in found.estimate.phases if phase.label}
        assert labels <= {"epoch 1", "epoch 2", "epoch 3"}
        assert "validation" in {phase.name for phase in found.estimate.phases}
        assert all("parameters are trained" in note.message for note in found.job.notes)


def test_a_second_fit_of_the_same_trainer_is_followed_too(tmp_path: Any) -> None:
    guard = VramGuard(**in_advanced({"budget": "1GiB", "mode": "report", "margin": 0, "remember": False}))
    trainer, module = cases.make_trainer(NAMESPACE, tmp_path, [guard], max_epochs=1), Logging()
    for _fit in range(2):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader(), loader())
        assert "validation" in {phase.name for phase in guard.plan.before.phases}


def test_a_second_evaluation_of_the_same_trainer_is_told_too(tmp_path: Any, capsys: Any) -> None:
    guard = VramGuard(**in_advanced({"budget": "1GiB", "margin": 0, "remember": False}))
    trainer, module = cases.make_trainer(NAMESPACE, tmp_path, [guard]), Judged()
    for _test in range(2):
        trainer.test(module, loader(), verbose=False)
        assert "vram_guard: trainer.test fits: " in capsys.readouterr().out


class Saving(pl.Callback):  # type: ignore[misc, name-defined]
    """Saves in the midst of an epoch's end, as ModelCheckpoint may."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "validated.ckpt")


def test_a_checkpoint_that_a_validation_ended_with_is_resumed(tmp_path: Any) -> None:
    cases.make_trainer(NAMESPACE, tmp_path, [Saving()], max_epochs=1).fit(Net(), loader(), loader())
    found = told(tmp_path, Net(), validation=loader(), ckpt_path=tmp_path / "validated.ckpt")
    assert [phase.name for phase in found.estimate.phases][:3] == ["setup", "resuming", "training"]
    assert not found.job.notes


# --- what steps and hooks look up -------------------------------------------------------------------------------


def test_a_script_of_lightning_cli_is_predicted_with_the_optimizer_of_its_command_line(tmp_path: Any) -> None:
    """The CLI makes the optimizer itself, over the weights that a trace exchanges."""
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("jsonargparse")
    guard = "--trainer.callbacks"
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "cases" / "lightning_cli_script.py"),
        "fit",
        "--optimizer",
        "AdamW",
    ]
    command += [guard, "vram_guard_lightning.VramGuard", f"{guard}.budget", "4GiB", f"{guard}.mode", "report"]
    command += ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "optimizer states" in done.stderr + done.stdout
    assert "no prediction" not in done.stderr + done.stdout


class Rows(torch.utils.data.Dataset[Any]):
    """Samples of as many rows as it is told."""

    rows = 1

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return (torch.ones(self.rows, WIDTH),)


class Switching(pl.Callback):  # type: ignore[misc, name-defined]
    """Changes the loader that is there: its batches from epoch 2 on, its samples in epoch 3."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        used = trainer.train_dataloader
        used.batch_sampler.batch_size = 2048 if trainer.current_epoch >= 2 else SIZE
        used.dataset.rows = 2 if trainer.current_epoch == 3 else 1


def test_a_callback_that_switches_the_loaders_batches(tmp_path: Any) -> None:
    data = DataLoader(Rows(), SIZE)
    found = told(tmp_path, Net(), Switching(), data=data)
    step = found.capture.step.with_(job=None)
    for epoch, rows in (("epoch 2", 2048), ("epoch 3", 4096)):
        assert peaks(found)["training", epoch] == trace_at(step, rows).at(rows).peak_allocated + LOSS_COPY
    assert (data.batch_sampler.batch_size, vars(data.dataset)) == (SIZE, {})
    assert not [note for note in found.job.notes if "cannot be followed" in note.message]


class Counters(pl.Callback):  # type: ignore[misc, name-defined]
    """Notes what hooks see of the Trainer's counters, and raises it at the last: what a copy notes ends with it."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.seen: list[Any] = []

    def note(self, name: str, trainer: Any) -> None:
        epochs = trainer.fit_loop.epoch_progress.current
        counted = (epochs.ready, epochs.started, epochs.processed, epochs.completed)
        self.seen.append((name, trainer.current_epoch, trainer.global_step, counted, trainer.training))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_fit_start", trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_start", trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_train_epoch_end", trainer)
        if self.raises and trainer.current_epoch == 2:
            raise ValueError(f"{self.seen}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.raises:
            raise ValueError("a copy tells nobody that the training is over")


def test_hooks_of_a_trace_see_the_counters_that_they_see_in_the_training(tmp_path: Any) -> None:
    real = Counters(raises=False)
    cases.make_trainer(NAMESPACE, tmp_path, [real], max_epochs=3).fit(Net(), loader())
    (note,) = told(tmp_path, Net(), Counters(raises=True), max_epochs=3).job.notes
    assert real.seen
    assert f"ValueError: {real.seen}" in note.message
