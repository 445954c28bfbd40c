"""What copies of a script's process would have allocated: asked for by the planner, one copy for each answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.errors import VramGuardError
from vram_guard.plan.source import TraceRequest
from vram_guard.simulate import TRACED_SIZES
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.results import Answer, Facts, Failure

if TYPE_CHECKING:
    from vram_guard.timeline import Timeline
    from vram_guard_accelerate.dry_run.fork_server import FarCopy
    from vram_guard_accelerate.dry_run.run import DryRun


class Traces:
    """The answers of one dry run's copies, each asked for once.

    Args:
        run: at its first training batch, when any of the methods is called.
    """

    def __init__(self, run: DryRun) -> None:
        self._run = run
        self._traced: dict[TraceRequest, Answer | forks.Copy | FarCopy] = {}
        self.why_not_sliced = ""
        """Why a copy that worked in slices came to no answer; "" where none failed."""
        self.why_not_sharded = ""
        """Why a copy whose parameters wait on the host came to no answer; "" where none failed."""

    def first_look(self) -> Facts:
        """The loop as written, at its own batch size: what it does, before anything is planned."""
        assert self._run.sample is not None
        as_written = TraceRequest(self._run.sample.batch_size, self._run.precision)
        answer = self._traced[as_written] = self._answer_of(forks.Copy(as_written))
        self._run.compares = answer.facts.compares
        return answer.facts

    def facts_at(self, batch_size: int) -> Facts:
        """The loop as written, at another size of batches."""
        return self._answer(TraceRequest(batch_size, self._run.precision)).facts

    def trace(self, request: TraceRequest) -> Timeline:
        """:attr:`vram_guard.plan.source.Source.trace` of the script's loop."""
        return self._answer(request).timeline

    def _answer(self, request: TraceRequest) -> Answer:
        if request not in self._traced:
            # The planner asks for these two one after the other: they run side by side.
            sizes = TRACED_SIZES if request.batch_size == TRACED_SIZES[0] else (request.batch_size,)
            for wanted in (replace(request, batch_size=size) for size in sizes):
                if wanted not in self._traced:
                    self._traced[wanted] = self._copy_for(wanted)
        waiting = self._traced[request]
        if isinstance(waiting, Answer):
            return waiting
        try:
            answer = self._traced[request] = self._answer_of(waiting)
        except VramGuardError as error:
            self.why_not_sliced = str(error) if request.slices_of_model > 1 else self.why_not_sliced
            self.why_not_sharded = str(error) if request.recipe.parameters_on_host else self.why_not_sharded
            raise
        return answer

    def _copy_for(self, request: TraceRequest) -> forks.Copy | FarCopy:
        """A copy from here, or from where the model is prepared, where it has to be prepared in another way."""
        if not request.recipe.parameters_on_host:
            return forks.Copy(request)
        assert self._run.standby is not None
        return self._run.standby.copy(request)

    def _answer_of(self, copy: forks.Copy | FarCopy) -> Answer:
        answer = copy.answer(self._run.patience)
        if isinstance(answer, Failure):
            raise answer.as_error()
        assert isinstance(answer, Answer)
        return answer
