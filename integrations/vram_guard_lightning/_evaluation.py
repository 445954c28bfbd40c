"""``trainer.validate``, ``trainer.test`` and ``trainer.predict``: their own loops in a trace, before they begin.

Lightning gives all memory of a training back before one of them begins, so each is predicted by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.capture.later_calls import later_calls
from vram_guard.errors import UnsupportedStepError
from vram_guard.forks.exclusive import in_copy
from vram_guard.forks.fork import can_fork
from vram_guard.guard.evaluation import CapturedEvaluation, evaluation_step
from vram_guard.language import _
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.state.random_generators import random_state_kept
from vram_guard.timeline import PhaseName
from vram_guard_lightning import _deepspeed, _layouts, _namespaces, _trainer_proxy, private_api
from vram_guard_lightning._capture import check_precision, silent_view
from vram_guard_lightning._followed import FollowedTrainer
from vram_guard_lightning._validation import EvaluationBatches, read_rounds

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.job import LoopRun

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


class EvaluationKind(NamedTuple):
    """One of the Trainer's functions besides ``fit``."""

    phase: PhaseName
    loop: str
    limit: str


#: Stage of Lightning's ``setup`` hook -> what runs then.
KINDS = {
    "validate": EvaluationKind("validation", "validate_loop", "limit_val_batches"),
    "test": EvaluationKind("test", "test_loop", "limit_test_batches"),
    "predict": EvaluationKind("prediction", "predict_loop", "limit_predict_batches"),
}


def comes_later(trainer: Trainer) -> Iterator[str]:
    """Evaluations that the script calls after its training, over loaders that its module or datamodule declares."""
    stages = ("test", "predict")
    called = later_calls(*stages) if can_fork() else ()
    for stage in stages:
        source: Any = getattr(trainer, KINDS[stage].loop)._data_source
        if stage in called and source.instance is not None and source.is_defined():
            yield stage


def capture_later(
    trainer: Trainer, module: LightningModule, stage: str, planned_batch: PlannedBatch
) -> CapturedEvaluation:
    """Read an evaluation that comes after the training, in a copy of the process, as if it had begun.

    Args:
        trainer: whose ``fit`` is running.
        module: that it trains.
        stage: of :data:`KINDS`.
        planned_batch: its longest batch.

    Raises:
        UnsupportedStepError: it cannot be predicted; the message says what stands in the way.
    """
    if not in_copy():
        raise UnsupportedStepError(_("it cannot be looked at before it begins"))
    states = import_module(f"{_namespaces.of(trainer).__name__}.trainer.states")
    trainer.state.fn, trainer.state.stage = states.TrainerFn(stage), states.RunningStage(stage)
    for part in (trainer.datamodule, module):  # type: ignore[attr-defined]
        if part is not None:
            part.setup(stage)
    return capture_evaluation(trainer, module, stage, planned_batch)


def capture_evaluation(
    trainer: Trainer, module: LightningModule, stage: str, planned_batch: PlannedBatch
) -> CapturedEvaluation:
    """Read an evaluation from a Trainer whose strategy is not set up yet. Changes nothing.

    Args:
        trainer: that is about to run it.
        module: that it evaluates.
        stage: of :data:`KINDS`.
        planned_batch: its longest batch.

    Raises:
        UnsupportedStepError: it cannot be predicted; the message says what stands in the way.
    """
    check_precision(trainer)
    if missing := private_api.missing(_namespaces.of(trainer), private_api.JOB):
        raise UnsupportedStepError(_("this release of Lightning lacks {names}", names="; ".join(missing)))
    if _deepspeed.used(trainer):
        raise UnsupportedStepError(_("DeepSpeed's engine is followed where it trains alone"))
    kind = KINDS[stage]
    source: Any = getattr(trainer, kind.loop)._data_source
    with random_state_kept():
        rounds = read_rounds(trainer, source.dataloader(), getattr(trainer, kind.limit), _(kind.phase), planned_batch)
    if rounds is None:
        raise UnsupportedStepError(_("its loaders have no batches"))
    step = evaluation_step(
        module,
        rounds.of_at_most,
        _EvaluationJob(trainer, module, rounds, kind, _layouts.data_ranks(trainer)),
        ends_process=True,
        precision=trainer.precision,
        parallel=_layouts.layout_of(trainer),
        device="cpu" if trainer.strategy.root_device.type == "cpu" else "cuda",
    )
    symbolic_run = functools.partial(_trainer_proxy.symbolic_run, trainer, module, silent_view(trainer))
    return CapturedEvaluation(step, rounds.batch_size, symbolic_run, rounds.notes)


@dataclass(frozen=True)
class _EvaluationJob:
    """``Job.play``."""

    trainer: Trainer
    module: LightningModule
    rounds: EvaluationBatches
    kind: EvaluationKind
    data_ranks: int

    def __call__(self, run: LoopRun) -> None:
        trainer: Any = self.trainer
        followed = FollowedTrainer(run, trainer, self.module, self.data_ranks)
        followed.show_as(trainer)
        loop = getattr(trainer, self.kind.loop)
        loop.verbose = False
        with run.phase(self.kind.phase):
            self.rounds.run(followed, loop, loop.run, most=run.batch_size)
