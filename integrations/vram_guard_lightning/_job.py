"""The whole job of a Trainer: its own loops, from the end of the strategy's setup on, in a copy of the process.

The first epoch ends after two steps, with a validation and a checkpoint; of later epochs the hooks run, and the steps
that differ from those before them (:mod:`._later`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.microbatch import splitter_of
from vram_guard.guard.unfollowed import in_a_line
from vram_guard.job import Job, LoopRun
from vram_guard.language import Message, _
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.parallel.resharding import divided_by_fsdp2
from vram_guard.patching import replace_attributes, replaced
from vram_guard.proof.effects import StepEffects
from vram_guard.state.random_generators import random_state_kept
from vram_guard.watch.batches import MicroBatches
from vram_guard_lightning import _layouts, _namespaces
from vram_guard_lightning._closure import replace_closures
from vram_guard_lightning._followed import FollowedTrainer
from vram_guard_lightning._later import TrainerSteps
from vram_guard_lightning._trainer_proxy import TrainerView
from vram_guard_lightning._validation import EvaluationBatches, read_validation

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.capture.loader import Sample

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


@dataclass
class Heard:
    """What the step's own loss is told by the loop that calls it.

    Attributes:
        arguments: of training_step beside the batch, where Lightning's own loop calls it; None: a trace of steps alone.
        effects: of the steps of symbolic runs.
    """

    arguments: tuple[Any, ...] | None = None
    effects: StepEffects = field(default_factory=StepEffects)


def job_of(
    trainer: Trainer,
    module: LightningModule,
    sample: Sample,
    batches: float,
    heard: Heard,
    planned_batch: PlannedBatch,
) -> tuple[Job, list[str]]:
    """The job of this training, and remarks for a reader of the prediction. Changes nothing.

    Args:
        trainer: whose strategy is not set up yet.
        module: that it trains.
        sample: of its train loader.
        batches: of one epoch; infinite where nobody knows.
        heard: read by the step's own loss.
        planned_batch: the longest batch of its validation.
    """
    notes: list[str] = []
    validation = None
    try:
        with random_state_kept():
            validation = read_validation(trainer, planned_batch)
    except Exception as error:  # noqa: BLE001 - the user's own code makes the loaders
        notes.append(_("validation is not included in the prediction ({why})", why=in_a_line(error)))
    if validation is not None:
        notes += validation.notes
    epochs = _epochs(trainer, batches)
    steps = 1 if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
    play = _TrainingJob(trainer, module, validation, sample, epochs, steps, heard, _layouts.data_ranks(trainer))
    return Job(play, steps=_steps(trainer, epochs, steps), ends_process=True), notes


def _epochs(trainer: Trainer, batches: float) -> float:
    """Epochs of the training."""
    most = math.inf if trainer.max_epochs in (-1, None) else float(trainer.max_epochs or 0)
    if trainer.max_steps == -1 or math.isinf(batches):
        return most
    return min(most, math.ceil(trainer.max_steps * trainer.accumulate_grad_batches / batches))


def _steps(trainer: Trainer, epochs: float, of_epoch: int) -> int | None:
    """Optimizer steps of the training; None where nobody knows, or something may end it before."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    ends = any(_namespaces.is_a(one, f"callbacks.{name}") for one in callbacks for name in ("EarlyStopping", "Timer"))
    most = math.inf if trainer.max_steps == -1 else trainer.max_steps
    steps = min(most, epochs * of_epoch)
    return None if ends or math.isinf(steps) or math.isinf(epochs) else int(steps)


@dataclass(frozen=True)
class _TrainingJob:
    """``Job.play``: the Trainer's own loops, from where its strategy is set up to the end of the training."""

    trainer: Trainer
    module: LightningModule
    validation: EvaluationBatches | None
    sample: Sample
    epochs: float
    steps: int
    heard: Heard
    data_ranks: int
    most: int | None = None
    """Samples of a batch of validation; None: as many as its loaders deliver."""

    def evaluation_batch_size(self, name: str) -> int | None:
        """See :class:`~vram_guard.job.Resizable`."""
        return None if self.validation is None or name != "validation" else self.validation.batch_size

    def with_evaluation_batch_size(self, _name: str, size: int) -> _TrainingJob:
        """See :class:`~vram_guard.job.Resizable`."""
        return replace(self, most=size)

    def __call__(self, run: LoopRun) -> None:
        """The rest of a Trainer's run."""
        trainer: Any = self.trainer
        followed = FollowedTrainer(run, self.trainer, self.module, self.data_ranks)
        if self.validation is None:
            trainer.limit_val_batches = 0
        cut = run.loaded_samples > run.batch_size
        trainer.accumulate_grad_batches = 1 if cut else min(run.accumulate, 2)
        if cut:
            splitter = splitter_of(self.sample.make, run.loaded_samples, run.batch_size)
            replace_closures(trainer, MicroBatches(splitter, "mean"))
        _Fit(followed, self).run()


class _Fit:
    """``Trainer.fit``, from the end of the strategy's setup on."""

    def __init__(self, followed: FollowedTrainer, job: _TrainingJob) -> None:
        self._followed = followed
        self._run = followed.run
        self._trainer = followed.trainer
        self._job = job
        self._validated = False
        self._begun = False
        """The first epoch is over."""
        self._rest = False
        """What runs now is the rest of an epoch that a checkpoint was saved in."""
        self._steps: TrainerSteps
        self._next: str | None = None
        """The label of the step that comes next in this epoch; None: there is none."""
        self._pending: Iterator[str] = iter(())

    def run(self) -> None:
        """All of it."""
        trainer, followed, run = self._trainer, self._followed, self._run
        trainer.training = True
        with run.phase("setup"):
            followed.call("on_fit_start")
        self._resume()
        self._steps = TrainerSteps(followed, self._job.epochs, self._job.steps, self._job.sample)
        seen = TrainerView(trainer)
        vars(seen)["_asked"] = self._steps.asked
        followed.show_as(seen)
        self._follow_loops()
        with run.loop(micro_batches=followed.module.automatic_optimization):
            trainer._run_sanity_check()
            trainer.fit_loop.run()

    def _resume(self) -> None:
        """States of a checkpoint that Lightning has read, as it loads them beside those that are there."""
        connector, run = self._trainer._checkpoint_connector, self._run
        if not connector._loaded_checkpoint:
            return
        if divided_by_fsdp2(run.model):  # states are divided as they are loaded, which talks to other ranks
            run.note(Message("resuming a sharded model is not included in the prediction"))
        else:
            with self._followed.followed(Message("resuming")), run.phase("resuming"):
                connector.restore_training_state()
        connector._loaded_checkpoint = {}

    def _follow_loops(self) -> None:
        """Lightning's loops take the batches and the steps that are followed, and say where they are."""
        trainer, followed = self._trainer, self._followed
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        strategy, validates = trainer.strategy, epoch.val_loop
        followed.batches[fit] = self._batches
        epoch_starts, epoch_ends, batch_ends, validation = (
            fit.on_advance_start,
            fit.on_advance_end,
            epoch.on_advance_end,
            validates.run,
        )

        def training_step(batch: Any, *arguments: Any, **_named: Any) -> Any:
            self._job.heard.arguments = arguments
            with self._steps.in_step():
                return self._run.loss(batch)

        def on_epoch_starts() -> None:
            with self._run.phase("hooks" if self._begun else "setup"), replaced(torch, {"equal": _same}):
                epoch_starts()
            self._take_over_optimizer()
            # A checkpoint of an epoch's end: its last hooks run once more, and the next epoch is the first.
            self._rest = epoch.restarting and epoch.batch_progress.is_last_batch
            if self._rest:
                epoch.restarting = False
            self._pending = iter(()) if self._rest else self._steps.epoch_begins()
            self._next = next(self._pending, None)

        def on_epoch_ends() -> None:
            if self._rest:
                epoch_ends()
                return
            self._save()
            self._steps.epoch_ends()
            with self._run.phase("hooks"), replaced(torch, {"equal": _same}):
                epoch_ends()
            self._steps.ended()  # what of it stays is mostly what has been logged
            self._begun = True

        def on_batch_ends(fetcher: Any) -> None:
            if not epoch._should_accumulate():
                self._steps.step_ends()
                self._next = next(self._pending, None)
            epoch.batch_progress.is_last_batch = self._next is None
            batch_ends(fetcher)

        strategy.training_step = training_step
        epoch._broadcast_sigterm_tensor = lambda: None
        epoch._should_check_val_fx = lambda _fetcher: (
            self._next is None and self._job.validation is not None and not self._validated
        )
        _with(fit, done=lambda _loop: self._steps.over, skip=lambda _loop: False)
        _with(epoch, done=lambda loop: loop.batch_progress.is_last_batch)
        # Hooks of the end tell others that the training is over, which it is not: they are not called.
        ends = {"on_advance_start": on_epoch_starts, "on_advance_end": on_epoch_ends, "on_run_end": lambda: None}
        replace_attributes(fit, ends)
        replace_attributes(epoch, {"on_advance_end": on_batch_ends})
        replace_attributes(validates, {"run": lambda: self._validate(validates, validation)})

    def _take_over_optimizer(self) -> None:
        """A hook may have made another optimizer: nothing keeps the one before it."""
        made = self._trainer.optimizers
        if self._run.optimizer is not None and made and made[0] is not self._run.optimizer:
            self._run.optimize_with(made[0])

    def _batches(self) -> Iterator[tuple[Any, int, int]]:
        """Of one epoch."""
        number = 0
        while self._next is not None:
            batch = self._steps.batches.batch()
            self._steps.batches.used()
            self._run.batch_begins(self._next)
            yield batch, number, 0
            del batch
            number += 1

    def _validate(self, loop: Any, start: Callable[[], Any]) -> None:
        validation, trainer, followed = self._job.validation, self._trainer, self._followed
        if validation is None:
            return
        sanity = trainer.num_sanity_val_steps if trainer.sanity_checking else None
        what = Message("validation") if sanity is None else Message("the sanity check")
        label = "" if sanity is None else _("sanity check")
        with followed.followed(what), self._run.phase("validation", label):
            try:
                validation.run(followed, loop, start, sanity=sanity, most=self._job.most)
            finally:
                loop._results.batch = None  # it is let go of at the end of a round, which may have raised
        if sanity is None:
            self._validated = True
            self._steps.elsewhere()

    def _save(self) -> None:
        """A checkpoint as the Trainer's callbacks save it, once; it is not written."""
        trainer, followed = self._trainer, self._followed
        saving = [one for one in trainer.callbacks if _namespaces.is_a(one, "callbacks.Checkpoint")]
        if self._begun or not saving or trainer.fast_dev_run:  # ModelCheckpoint saves nothing then
            return
        weights_only = all(getattr(one, "save_weights_only", False) for one in saving)
        with followed.followed(Message("saving a checkpoint")), self._run.phase("saving"):
            trainer.save_checkpoint("", weights_only)
        if followed.has("on_save_checkpoint"):
            self._steps.elsewhere()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` for weights that training has told apart: equal is what is the same."""
    return one is other


def _with(loop: Any, **properties: Callable[[Any], Any]) -> None:
    """An object gets other values of these properties of its class."""
    kind = type(loop)
    loop.__class__ = type(kind.__name__, (kind,), {name: property(value) for name, value in properties.items()})
