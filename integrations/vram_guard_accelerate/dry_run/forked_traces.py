"""Timelines from copies of a script's process: asked for by the planner, one copy for each answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from vram_guard.capture.loader import Sample
from vram_guard.errors import UnsupportedStepError, UnsupportedTechniqueError, VramGuardError
from vram_guard.forks.fork import Copy, answer_of
from vram_guard.language import _
from vram_guard.limits import ANSWER_SECONDS, COPY_SECONDS, TRACE_SECONDS
from vram_guard.longest.choice import choose
from vram_guard.longest.planned_batch import PlannedBatch
from vram_guard.plan.source import TraceRequest
from vram_guard.proof.bodies import BodyFacts, Watch, body_of
from vram_guard.proof.later_changes import functions_around, read_code_around
from vram_guard.simulate import TRACED_SIZES
from vram_guard.timeline import Note, Timeline
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.results import DryRunFailure, TraceResult

#: What is asked of a copy, and whether of the whole job.
_TraceKey = tuple[TraceRequest, bool]

#: Seconds that one copy may take, which says itself where it stands when its time is over.
PATIENCE = TRACE_SECONDS + ANSWER_SECONDS


class ForkedTraces:
    """The answers of a script's copies, each asked for once.

    Args:
        first: the script at its first training batch.
    """

    def __init__(self, first: FirstBatch) -> None:
        self._first = first
        self._answers: dict[_TraceKey, TraceResult] = {}
        self._running: dict[_TraceKey, Copy[Any]] = {}
        self.fails_at_others = ""
        """The reason why the loop as written fails at another batch size than its own; "" where none was seen to."""

    def first_trace(self) -> TraceResult:
        """The loop as written, at its own batch size: what it does, before anything is planned."""
        return self._answer(TraceRequest(self._first.sample.batch_size, self._first.precision))

    def body(self) -> BodyFacts:
        """The module of the loop's models that may run over slices of a batch.

        Raises:
            UnsupportedTechniqueError: there is none; names what stands in the way.
            VramGuardError: a copy came to no answer.
        """

        def look(watch: Watch, size: int) -> Any:
            request = TraceRequest(size, self._first.precision)
            ask = partial(self._fork, request, False, watch=watch)
            found = _answer_of(ask, _what(request)).watched
            if isinstance(found, UnsupportedTechniqueError):
                raise found
            return found

        read_code_around()
        return body_of(look, self._first.sample.batch_size, functions_around)

    def trace(self, request: TraceRequest) -> Timeline:
        """:attr:`vram_guard.plan.source.Source.trace` of the script's loop."""
        return self._answer(request).timeline

    @property
    def kept_outputs(self) -> int:
        """Bytes that a Trainer keeps of all batches of an evaluation, and would not with another argument."""
        return max((one.kept_outputs for one in self._answers.values()), default=0)

    def whole_job(self, request: TraceRequest) -> Timeline:
        """The same with what the script does besides its steps, as far as that can be followed."""
        try:
            return self._answer(request, whole_job=True).timeline
        except VramGuardError as error:
            alone = self.trace(request)
            note = Note(_("what the script does besides its training steps is not included ({why})", why=error))
            return replace(alone, notes=(*alone.notes, note))

    def _answer(self, request: TraceRequest, *, whole_job: bool = False) -> TraceResult:
        if (request, whole_job) in self._answers:
            return self._answers[request, whole_job]
        # The planner asks for these two one after the other: they run side by side.
        both = request.batch_size == TRACED_SIZES[0] and not request.compiled
        sizes = TRACED_SIZES if both else (request.batch_size,)
        for wanted in ((replace(request, batch_size=size), whole_job) for size in sizes):
            if wanted not in self._answers and wanted not in self._running:
                self._running[wanted] = self._fork(*wanted)
        try:
            ask, begun = partial(self._fork, request, whole_job), self._running.pop((request, whole_job))
            # One that compiles counts its processor's seconds itself; it is given up where it does not work.
            seconds = COPY_SECONDS if request.compiled else PATIENCE
            answer = _answer_of(ask, _what(request), begun, seconds)
            self._answers[request, whole_job] = answer
        except VramGuardError as error:
            as_written = request == TraceRequest(request.batch_size, self._first.precision)
            if not whole_job and as_written and request.batch_size != self._first.sample.batch_size:
                self.fails_at_others = _("with batches of {count} samples, {why}", count=request.batch_size, why=error)
            raise
        return answer

    def _fork(self, request: TraceRequest, whole_job: bool, watch: Watch | None = None) -> Copy[Any]:
        return forks.fork(forks.ForkTask(request, whole_job=whole_job, watch=watch))


def longest_of(first: FirstBatch, planned_batch: PlannedBatch) -> Sample:
    """The sample with the longest batch that the script's loader makes, called where the script's process may change.

    Args:
        first: the script.
        planned_batch: which batch is meant.
    """

    def peak(size: int) -> tuple[int, int]:
        taken = ForkedTraces(first).trace(TraceRequest(size, first.precision)).at(size)
        return taken.peak_reserved, taken.peak_allocated

    return choose(first.sample, planned_batch, ranks=first.shape.ranks, by_batches=True, peak=peak, in_copy=False)


def _what(request: TraceRequest) -> str:
    """A copy, in words."""
    return _("the copy that would have tried batches of {count} samples", count=request.batch_size)


def _answer_of(
    ask: Callable[[], Copy[Any]], what: str, begun: Copy[Any] | None = None, seconds: float = PATIENCE
) -> TraceResult:
    answer = answer_of(ask, what, seconds, begun)
    if isinstance(answer, DryRunFailure):
        raise answer.as_error()
    if not isinstance(answer, TraceResult):
        raise UnsupportedStepError(_("a copy of the script gave no valid answer"))
    return answer
