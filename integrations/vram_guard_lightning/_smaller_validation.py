"""Smaller batches of a Trainer's validation: where they are refused, how they are rehearsed, and how they are applied.

The loaders that the user's hook returns get another batch size in place, as a larger batch of the training does
(:mod:`._growth`): the same samples in the same order, in more batches.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.evaluation import smaller_batches, why_not_smaller
from vram_guard.guard.refusals import Refusal
from vram_guard.job import evenly
from vram_guard.language import _
from vram_guard.proof.evaluations import EvaluationRehearsal, RehearsedEvaluation
from vram_guard_lightning import _layouts, _namespaces, _rehearsal
from vram_guard_lightning._sample import loaders_in
from vram_guard_lightning._shadow import followed_callbacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.capture.loader import Sample
    from vram_guard.guard.applied import Applied
    from vram_guard.plan.model import SmallerEvaluation
    from vram_guard.proof.observed import Observed
    from vram_guard_lightning._validation import EvaluationBatches

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: Hooks of a module that Lightning calls for a batch of validation -> the position of the batch's number.
_NUMBERED = {"validation_step": 1, "on_validation_batch_start": 1, "on_validation_batch_end": 2}


def samples(rounds: EvaluationBatches | None) -> tuple[int, ...]:
    """Samples of the data sets of its loaders."""
    return () if rounds is None else tuple(one.sample.dataset_size or 0 for one in rounds.loaders)


def objection(
    trainer: Trainer, module: LightningModule, rounds: EvaluationBatches | None, size: int, training: Sample
) -> Refusal | None:
    """The refusal of smaller batches of validation; None where only a run can tell.

    Args:
        trainer: whose strategy is not set up yet.
        module: that it trains.
        rounds: of its validation.
        size: of the smaller batches.
        training: of the train loader.
    """
    why = next(_why_not(trainer, module, rounds, size, training), "")
    return Refusal("evaluation", why) if why else None


def _why_not(
    trainer: Trainer, module: LightningModule, rounds: EvaluationBatches | None, size: int, training: Sample
) -> Iterator[str]:
    limit = trainer.limit_val_batches
    if not isinstance(limit, float) or limit != 1.0 or trainer.overfit_batches:  # type: ignore[attr-defined]
        yield _("limit_val_batches counts batches")
    if "dataloader_iter" in inspect.signature(module.validation_step).parameters:
        yield _("validation_step fetches its batches itself")
    for callback in followed_callbacks(trainer):
        for name in ("on_validation_batch_start", "on_validation_batch_end"):
            if not _namespaces.is_lightnings(callback, name):
                yield _("{name} of {kind} is called for every batch", name=name, kind=type(callback).__name__)
    of_training = {id(one) for one in loaders_in(training.loader)}
    for one in () if rounds is None else rounds.loaders:
        if id(one.sample.loader) in of_training:
            yield _("the training reads the same loader")
        if one.sample.batch_size > size:
            yield why_not_smaller(one.sample.loader, size, ranks=_layouts.data_ranks(trainer))


def install(trainer: Trainer, change: SmallerEvaluation, applied: Applied) -> None:
    """Deliver batches of at most so many samples; the sanity check sees the same samples.

    Args:
        trainer: whose strategy is not set up yet.
        change: of its validation.
        applied: the changes of the guard.
    """
    source: Any = trainer.fit_loop.epoch_loop.val_loop._data_source
    handed_out = source.dataloader

    def dataloader() -> Any:
        made = handed_out()
        for loader in loaders_in(made):
            smaller_batches(loader, change.batch_size, applied)
        return made

    applied.replace(source, "dataloader", dataloader)
    if trainer.num_sanity_val_steps > 0:
        more = change.batch_size_before // evenly(change.batch_size_before, change.batch_size)
        applied.replace(trainer, "num_sanity_val_steps", trainer.num_sanity_val_steps * more)


def rehearse(
    trainer: Trainer, module: LightningModule, rounds: EvaluationBatches | None, rehearsal: EvaluationRehearsal
) -> Observed:
    """Run validation for real on the CPU; what is done to the Trainer is not undone.

    Args:
        trainer: of a copy of the process, whose strategy is not set up yet.
        module: that it trains.
        rounds: of its validation.
        rehearsal: how it is run.

    Raises:
        Exception: whatever the user's code or Lightning raises.
    """
    if rounds is None or _layouts.shards_in_configure_model(trainer):
        raise UnsupportedStepError(_("there is no validation that could be run"))
    namespace = _namespaces.of(trainer)
    closed = tuple(_namespaces.part(namespace, path) for path in ("trainer.trainer.Trainer", "callbacks.Callback"))
    from torchmetrics import Metric  # it comes with Lightning, whose absence has its own message

    run = RehearsedEvaluation(module, closed=(*closed, Metric))
    _rehearsal.on_cpu(trainer, module, double=rehearsal.double)
    _rehearsal.quiet(trainer)
    trainer.limit_val_batches = 1.0
    if trainer.loggers:
        trainer.loggers = [_recording_logger(namespace, run)]
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop._data_source = type(loop._data_source)([rehearsal.loader(one.sample.loader) for one in rounds.loaders], "")
    loop._combined_loader, loop.verbose = None, False
    trainer.strategy.setup(trainer)
    for name, position in _NUMBERED.items():
        if not _namespaces.is_lightnings(module, name):
            run.watch_index(module, name, position)
    call: Any = import_module(f"{namespace.__name__}.trainer.call")
    call._call_callback_hooks(trainer, "on_fit_start")
    call._call_lightning_module_hook(trainer, "on_fit_start")
    run.begin()
    trainer.validating = True
    module.on_validation_model_zero_grad()
    loop.run()
    return run.result(logged={**trainer.callback_metrics, **trainer.logged_metrics})


def _recording_logger(namespace: Any, run: RehearsedEvaluation) -> Any:
    """A logger that writes nothing, and whose calls are compared."""
    plain = _namespaces.part(namespace, "loggers.logger.DummyLogger")
    logger, experiment = run.recorder("logger."), run.recorder("logger.experiment.")
    answers = {
        "experiment": property(lambda _self: experiment),
        "log_metrics": lambda _self, *args, **kwargs: logger.log_metrics(*args, **kwargs),
        "__getattr__": lambda _self, name: getattr(logger, name),
    }
    return type("RecordingLogger", (plain,), answers)()
