"""An evaluation that runs by itself, after a training or without one: what it takes is said before it begins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.capture.simulated_device import move_to_simulated_device
from vram_guard.errors import DoesNotFitError
from vram_guard.guard._decide import found_by_rank_zero, least_budget
from vram_guard.guard.ranks import Outcome, from_rank_zero
from vram_guard.job import Job
from vram_guard.language import _
from vram_guard.simulate import DEFAULT_CAPABILITY
from vram_guard.state.random_generators import random_state_kept
from vram_guard.step import TrainingStep
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.guard.settings import GuardSettings
    from vram_guard.guard.training import Training
    from vram_guard.timeline import Estimate, Timeline


@dataclass(frozen=True)
class CapturedEvaluation:
    """An evaluation in a form that can be traced.

    Attributes:
        step: see :func:`evaluation_step`.
        batch_size: of its largest loader.
        symbolic_run: inside of it the step may be traced, and the framework notices nothing.
        notes: remarks for a reader of the prediction.
    """

    step: TrainingStep
    batch_size: int
    symbolic_run: Callable[[], AbstractContextManager[None]]
    notes: tuple[str, ...] = ()


def evaluation_step(
    model: Any, batch: Callable[[int], Any], play: Callable[..., object], *, ends_process: bool = False, **fields: Any
) -> TrainingStep:
    """A step without an optimizer whose job runs an evaluation.

    Args:
        model: that it evaluates, on the host.
        batch: number of samples -> a batch of its loader.
        play: see :class:`~vram_guard.job.Job`; its batches have at most ``run.batch_size`` samples.
        ends_process: see there.
        fields: others of the :class:`~vram_guard.step.TrainingStep`.
    """
    return TrainingStep(
        model=model,
        batch=batch,
        loss=lambda model, batch: model(batch),  # never called: the job does it all
        optimizer=None,
        prepare=move_to_simulated_device,
        job=Job(play, ends_process=ends_process),
        **fields,
    )


@dataclass(frozen=True)
class Foreseen:
    """The prediction of an evaluation.

    Attributes:
        estimate: of the whole of it.
        budget: that it is held against, with the margin of its tier.
        batch_size: of its largest loader.
        smaller: half its batch size, or a half of that, ...: the first that fits, where the loader's does not; 0: none.
        notes: remarks.
    """

    estimate: Estimate
    budget: Budget
    batch_size: int
    smaller: int
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if it is known to stay within the budget."""
        return self.estimate.fits(self.budget)

    def words(self, what: str) -> str:
        """The prediction in a sentence or two.

        Args:
            what: the evaluation, as the user has called it.
        """
        peak, usable = self.estimate.peak_reserved, self.budget.usable
        said: dict[str, Any] = {"what": what, "peak": format_bytes(peak), "usable": format_bytes(usable)}
        said["size"] = self.batch_size
        if self.fits:
            return _("{what} fits: {peak} of {usable} usable, with batches of {size}", **said)
        if peak <= usable:
            return _("{what} takes at least {peak} of {usable} usable, and could not be followed to its end", **said)
        short = _("{what} does not fit: {peak} of {usable} usable, with batches of {size}.", **said)
        if not self.smaller:
            return short + " " + _("It does not with smaller batches either.")
        return short + " " + _("With batches of {size} it would; its loader is left as it is.", size=self.smaller)


def foresee(
    training: Training, capture: Callable[[], CapturedEvaluation], settings: GuardSettings, what: str
) -> Foreseen | None:
    """The prediction of an evaluation that is about to begin, the same on every rank; nothing is changed.

    Args:
        training: whose processes and device it runs on.
        capture: reads it.
        settings: of the guard.
        what: the evaluation, as the user has called it.

    Returns:
        None where it cannot be predicted, which is said.

    Raises:
        DoesNotFitError: in mode "strict" it does not fit.
        Exception: in mode "strict" it cannot be predicted.
    """
    outcome: Outcome[Any] = least_budget(training, settings)
    if outcome.value is not None:
        budget = outcome.value
        outcome = found_by_rank_zero(training, lambda _progress: _foreseen(capture(), settings, budget), capture)
    if outcome.value is None:
        if settings.mode == "strict":
            outcome.unwrap()
        why = "" if outcome.failure is None else outcome.failure.message
        training.warn(_("{what} is not predicted: {why}", what=what, why=why))
        return None
    found: Foreseen = from_rank_zero(training.ranks, outcome.value[0])
    if not found.fits:
        if settings.mode == "strict":
            raise DoesNotFitError(found.words(what))
        training.warn(found.words(what))
    return found


def _foreseen(captured: CapturedEvaluation, settings: GuardSettings, budget: Budget) -> Foreseen:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.simulate import trace_at

    allocator = AllocatorSettings.from_environment()

    def follow(size: int) -> Timeline:
        capability = budget.compute_capability or DEFAULT_CAPABILITY
        traced = trace_at(captured.step, size, compute_capability=capability, cudnn=settings.cudnn)
        return traced.on(budget.multiprocessors, budget.placement)

    size, smaller = captured.batch_size, 0
    with random_state_kept(), captured.symbolic_run():
        estimate = follow(size).at(size, settings=allocator)
        held_against = budget.for_tier(estimate.tier, estimate.network)
        if held_against.usable < estimate.peak_reserved:
            # Traced, and not by a law: what is collected of more, smaller batches may take more.
            halves = (size >> times for times in range(1, size.bit_length()))
            smaller = next((one for one in halves if follow(one).at(one, settings=allocator).fits(budget)), 0)
    notes = (*captured.notes, *(str(note.message) for note in estimate.notes))
    return Foreseen(estimate, held_against, size, smaller, tuple(dict.fromkeys(notes)))
