"""What copies of a script's process would have allocated: asked for by the planner, one copy for each answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.errors import VramGuardError
from vram_guard.simulate import TRACED_SIZES
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.results import Answer, Facts, Failure

if TYPE_CHECKING:
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline
    from vram_guard_accelerate.dry_run.fork_server import FarCopy
    from vram_guard_accelerate.dry_run.run import DryRun


@dataclass(frozen=True)
class Task:
    """What one copy is to do."""

    step: TrainingStep
    batch_size: int
    gathers: bool = False
    """Whether optimizers step after every second batch only, see :mod:`.smaller_batches`."""


class Traces:
    """The answers of one dry run's copies, each asked for once.

    Args:
        run: at its first training batch, when any of the methods is called.
    """

    def __init__(self, run: DryRun) -> None:
        self._run = run
        self._as_written: dict[int, Timeline] = {}
        self._traced: dict[Any, Answer | forks.Copy | FarCopy] = {}
        self.why_not_sliced = ""
        """Why a copy that worked in slices came to no answer; "" where none failed."""
        self.why_not_sharded = ""
        """Why a copy whose parameters wait on the host came to no answer; "" where none failed."""

    def first_look(self, step: TrainingStep) -> Facts:
        """The loop as written, at its own batch size: what it does, before anything is planned."""
        assert self._run.sample is not None
        answer = self._answer_of(forks.Copy(Task(step, self._run.sample.batch_size)))
        self._as_written[self._run.sample.batch_size] = answer.timeline
        self._run.compares = answer.facts.compares
        return answer.facts

    def facts_at(self, step: TrainingStep, batch_size: int) -> Facts:
        """The loop as written, at another size of batches."""
        self.trace(step, batch_size, self._run.capability)
        answer = self._traced[step.precision, step.slices, step.recipe, batch_size]
        assert isinstance(answer, Answer)
        return answer.facts

    def trace_gathered(self, step: TrainingStep, batch_size: int, capability: tuple[int, int]) -> Timeline:
        """As :meth:`trace`, where slices are batches of their own, which the script's own options make."""
        if step.slices == 1:
            return self.trace(step, batch_size, capability)
        key = ("gathered", step.precision, step.recipe, batch_size)
        if key not in self._traced:
            self._traced[key] = self._answer_of(self._copy_for(step.with_(slices=1), batch_size, gathers=True))
        answer = self._traced[key]
        assert isinstance(answer, Answer)
        return answer.timeline

    def trace(self, step: TrainingStep, batch_size: int, _capability: tuple[int, int]) -> Timeline:
        """:attr:`vram_guard.step.TrainingStep.runner`: the loop under a step's settings, at one micro-batch size."""
        as_written = step.precision == self._run.precision and step.slices == 1 and not step.recipe
        if as_written and batch_size in self._as_written:
            return self._as_written[batch_size]
        keys = [(step.precision, step.slices, step.recipe, size) for size in (batch_size, *TRACED_SIZES)]
        if keys[0] not in self._traced:
            # The planner asks for these two one after the other: they run side by side.
            wanted = keys[1:] if batch_size == TRACED_SIZES[0] else keys[:1]
            self._traced.update({key: self._copy_for(step, key[-1]) for key in wanted})
        waiting = self._traced[keys[0]]
        if not isinstance(waiting, Answer):
            try:
                waiting = self._traced[keys[0]] = self._answer_of(waiting)
            except VramGuardError as error:
                self.why_not_sliced = str(error) if step.slices > 1 else self.why_not_sliced
                self.why_not_sharded = str(error) if step.recipe.parameters_on_host else self.why_not_sharded
                raise
        return waiting.timeline

    def _copy_for(self, step: TrainingStep, batch_size: int, *, gathers: bool = False) -> forks.Copy | FarCopy:
        """A copy from here, or from where the model is prepared, where it has to be prepared in another way."""
        if not step.recipe.parameters_on_host:
            return forks.Copy(Task(step, batch_size, gathers))
        assert self._run.standby is not None
        portable = step.with_(model=_of_the_script, batch=None, loss=_of_the_script, optimizer=None, runner=None)
        return self._run.standby.copy(Task(portable, batch_size, gathers))

    def _answer_of(self, copy: forks.Copy | FarCopy) -> Answer:
        answer = copy.answer(self._run.patience)
        if isinstance(answer, Failure):
            raise answer.as_error()
        assert isinstance(answer, Answer)
        return answer


def _of_the_script(*_args: Any) -> Any:
    raise AssertionError("a script's loop is run by the script")
