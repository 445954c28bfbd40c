"""The whole job of a Trainer, played in a trace by Lightning's own code: what comes before, between and after steps.

The order is that of ``Trainer.fit``: hooks of the start, a checkpoint's states, sanity check, the first epoch with
validation and a checkpoint at its end, and later epochs as far as their hooks change the step (:mod:`._epochs`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from vram_guard.job import Job, JobRun
from vram_guard.language import Message, _
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.parallel.resharding import divided_by_fsdp2
from vram_guard.state.random_generators import random_state_kept
from vram_guard_lightning import _deepspeed, _namespaces, _shadow
from vram_guard_lightning._epochs import LaterEpochs
from vram_guard_lightning._play import Heard, Playing
from vram_guard_lightning._precision import plugin_of_trace
from vram_guard_lightning._sample import read
from vram_guard_lightning._validation import EvaluationBatches, read_validation

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.capture.loader import Sample

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: What user code reads of a Trainer's copy during a trace.
View = Callable[[Any], Any]


def job_of(
    trainer: Trainer,
    module: LightningModule,
    sample: Sample,
    batches: float,
    batch_of: Callable[[Sample], Callable[[int], Any]],
    view: View,
    heard: Heard,
    planned_batch: PlannedBatch,
) -> tuple[Job, LaterEpochs, list[str]]:
    """The job of this training, its later epochs, and remarks for a reader of the prediction. Changes nothing.

    Args:
        trainer: whose strategy is not set up yet.
        module: that it trains.
        sample: of its train loader.
        batches: of one epoch; infinite where nobody knows.
        batch_of: loader -> the batches of a step.
        view: of the Trainer's copy, for user code.
        heard: told of every training_step.
        planned_batch: the longest batch of its validation.
    """
    notes: list[str] = []
    validation = None
    try:
        with random_state_kept():
            validation = read_validation(trainer, planned_batch)
    except Exception as error:  # noqa: BLE001 - the user's own code makes the loaders
        why = f"{type(error).__name__}: {error}"
        notes.append(_("validation is not included in the prediction: {error}", error=why))
    if validation is not None:
        notes += validation.notes
    later = LaterEpochs(
        total=_epochs(trainer, batches),
        steps=1 if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches),
        sample=sample,
        reload=trainer.reload_dataloaders_every_n_epochs,  # type: ignore[attr-defined]
        read=lambda: _read_again(trainer),
        batch_of=batch_of,
    )
    return (
        Job(_TrainingJob(trainer, module, validation, later, view, heard), steps=_steps(trainer, later)),
        later,
        notes,
    )


def _epochs(trainer: Trainer, batches: float) -> float:
    """Epochs of the training."""
    most = math.inf if trainer.max_epochs in (-1, None) else float(trainer.max_epochs or 0)
    if trainer.max_steps == -1 or math.isinf(batches):
        return most
    return min(most, math.ceil(trainer.max_steps * trainer.accumulate_grad_batches / batches))


def _steps(trainer: Trainer, later: LaterEpochs) -> int | None:
    """Optimizer steps of the training; None where nobody knows, or something may end it before."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    ends = any(_namespaces.is_a(one, f"callbacks.{name}") for one in callbacks for name in ("EarlyStopping", "Timer"))
    most = math.inf if trainer.max_steps == -1 else trainer.max_steps
    steps = min(most, later.total * later.steps)
    return None if ends or math.isinf(steps) or math.isinf(later.total) else int(steps)


def _read_again(trainer: Trainer) -> Sample:
    source: Any = trainer.fit_loop._data_source
    with random_state_kept():
        return read(source.dataloader())


@dataclass(frozen=True)
class _TrainingJob:
    """``Job.play``: every call is another trace, and begins with the user's objects as they are."""

    trainer: Trainer
    module: LightningModule
    validation: EvaluationBatches | None
    later: LaterEpochs
    view: View
    heard: Heard
    most: int | None = None
    """Samples of a batch of validation; None: as many as its loaders deliver."""

    def evaluation_batch_size(self, name: str) -> int | None:
        """See :class:`~vram_guard.job.Resizable`."""
        return None if self.validation is None or name != "validation" else self.validation.batch_size

    def with_evaluation_batch_size(self, _name: str, size: int) -> _TrainingJob:
        """See :class:`~vram_guard.job.Resizable`."""
        return replace(self, most=size)

    def __call__(self, run: JobRun) -> None:
        trainer, module = self.trainer, self.module
        with _shadow.kept(trainer, module), self.later.loaders_kept():
            shadow = _shadow.shadow_of(trainer, plugin_of_trace(trainer, run.autocast()))
            if shadow.fit_loop._combined_loader is None:  # as hooks find it at trainer.train_dataloader
                combined = _namespaces.part(_namespaces.of(trainer), "utilities.combined_loader.CombinedLoader")
                shadow.fit_loop._combined_loader = combined(self.later.sample.loader, "max_size_cycle")
            trainer.strategy.optimizers = []  # those of a trace live as long as the copy has them
            seen = self.view(shadow)
            playing = Playing(run, shadow, module, self.heard, seen)
            for part in module.modules():
                if "_trainer" in vars(part):
                    vars(part)["_trainer"] = seen
            if trainer.datamodule is not None:  # type: ignore[attr-defined]
                trainer.datamodule.trainer = seen  # type: ignore[attr-defined]
            with _batch_ends_called(playing):
                self._fit(playing)

    def _fit(self, playing: Playing) -> None:
        """As a Trainer's run goes on once its strategy is set up."""
        shadow = playing.shadow
        _shadow.take_copies(self.trainer, shadow)
        shadow.training = True
        playing.call("on_fit_start")
        self._resume(playing)
        first = shadow.current_epoch
        if self.validation is not None and shadow.num_sanity_val_steps:
            self._validate(playing, shadow.num_sanity_val_steps)
        progress = shadow.fit_loop.epoch_progress.current
        playing.call("on_train_start")
        progress.ready = first + 1
        playing.call("on_train_epoch_start")
        progress.started = first + 1
        begun = time.process_time()
        playing.train(2)
        seconds = time.process_time() - begun
        if self.validation is not None:
            self._validate(playing)
        self._save(playing)
        between = self.validation is not None or playing.has("on_save_checkpoint")
        self.later.play(playing, first, seconds, between=between)

    def _resume(self, playing: Playing) -> None:
        """Optimizer states of a checkpoint that Lightning has read, as it loads them beside those that are there."""
        shadow = playing.shadow
        connector = shadow._checkpoint_connector
        if not connector._loaded_checkpoint:
            return
        if divided_by_fsdp2(playing.run.model):  # states are divided as they are loaded, which talks to other ranks
            playing.run.note(Message("resuming a sharded model is not included in the prediction"))
            connector._loaded_checkpoint = {}
            return
        with playing.followed(Message("resuming")), playing.run.phase("resuming"):
            connector.restore_loops()
            if "optimizer_states" in connector._loaded_checkpoint:
                connector.restore_optimizers()
        connector._loaded_checkpoint = {}

    def _validate(self, playing: Playing, sanity: int | None = None) -> None:
        shadow, module, validation = playing.shadow, playing.module, self.validation
        if validation is None:
            return
        what = Message("the sanity check") if sanity else Message("validation")
        label = "" if sanity is None else _("sanity check")
        loop = shadow.fit_loop.epoch_loop.val_loop
        with playing.followed(what), playing.run.phase("validation", label), logging_own(module):
            try:
                if sanity is not None:
                    validation.play(playing.run, shadow, loop, shadow._run_sanity_check, sanity=sanity, most=self.most)
                    return
                shadow.validating = True
                module.on_validation_model_zero_grad()
                validation.play(playing.run, shadow, loop, loop.run, most=self.most)
                shadow.training = True
            finally:
                loop._results.batch = None  # it is let go of at the end of a round, which may have raised

    def _save(self, playing: Playing) -> None:
        """A checkpoint as the Trainer's callbacks save it; it is not written."""
        saving = [one for one in self.trainer.callbacks if _namespaces.is_a(one, "callbacks.Checkpoint")]  # type: ignore[attr-defined]
        if not saving or self.trainer.fast_dev_run:  # type: ignore[attr-defined] # ModelCheckpoint saves nothing then
            return
        if _deepspeed.used(self.trainer):
            playing.run.note(Message("saving a checkpoint under DeepSpeed is not included in the prediction"))
            return
        weights_only = all(getattr(one, "save_weights_only", False) for one in saving)
        with playing.followed(Message("saving a checkpoint")), playing.run.phase("saving"):
            playing.shadow.save_checkpoint("", weights_only)


@contextlib.contextmanager
def logging_own(module: LightningModule) -> Iterator[None]:
    """``self.log`` is Lightning's own inside the block: it keeps metrics and values until an epoch is over."""
    silenced: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        own = vars(part)
        silenced.append((own, {name: own.pop(name) for name in ("log", "log_dict") if name in own}))
    try:
        yield
    finally:
        for own, silent in silenced:
            own.update(silent)


@contextlib.contextmanager
def _batch_ends_called(playing: Playing) -> Iterator[None]:
    """``on_train_batch_end`` after each optimizer step, while the batch and the gradients are alive."""
    heard, strategy = playing.heard, playing.shadow.strategy
    progress = playing.shadow.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    if not playing.has("on_train_batch_end") or len(strategy.optimizers) != 1:
        yield
        return

    def ended(optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if strategy.optimizers[0] is not optimizer:
            return
        progress.completed += 1
        batch, output, heard.batch, heard.output = heard.batch, heard.output, None, None
        if playing.has("on_train_batch_end"):
            playing.hook("on_train_batch_end", output, batch, 0)

    handle = register_optimizer_step_post_hook(ended)
    heard.listening = True
    try:
        yield
    finally:
        heard.listening, heard.batch, heard.output = False, None, None
        handle.remove()
