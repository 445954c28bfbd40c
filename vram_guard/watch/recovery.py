"""Recovery after a real out-of-memory error, in one process: the batch is rolled back and runs again in smaller parts.

A batch is an *attempt* at a micro-batch size. Before it, the state that forward changes is remembered; gradients of
earlier batches are set aside before its first backward; what it logs is kept back by the caller. When its gradients
are complete it is *committed*. Where memory runs out before that, everything is as before the attempt, memory is freed,
and the same batch runs in smaller micro-batches, as do all later ones. So no batch is lost or repeated, and every
optimizer step has the gradients of its whole batch. Where memory runs out after that (in the optimizer step, in a
hook), the error passes through.

Nothing here knows a framework: an adapter hands in a function that runs one attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vram_guard.errors import LossChangedError, RecoveryFailedError
from vram_guard.language import _
from vram_guard.watch._gradients import SetAside
from vram_guard.watch._rollback import CannotRollBackError, StateSnapshot
from vram_guard.watch.memory import Failure, MemoryReader, drop_traceback, free
from vram_guard.watch.oom import is_out_of_memory

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass
class MicroBatchSchedule:
    """The micro-batch sizes of one kind of batch, from the one in use downwards."""

    size: int | None = None
    """Samples of a micro-batch; None: batches stay whole."""
    full: int | None = None
    """Samples of a full batch, where that is known."""

    def below(self, samples: int) -> int:
        """The next smaller micro-batch size for batches of ``samples``: fewest equal parts; 0 where there is none."""
        total = self.full or samples
        now = min(self.size or total, total)
        smaller = (total // parts for parts in range(2, total + 1) if total % parts == 0)
        return next((size for size in smaller if size < now), 0)


@dataclass
class Attempt:
    """One try at one batch."""

    micro_batch_size: int | None
    """Samples of a micro-batch; None: the batch stays whole."""
    aside: SetAside
    stage: str = "forward"
    committed: bool = False
    last: bool = True
    """True where the next backward completes the gradients of the batch."""

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward of one micro-batch; after the last one's, :meth:`commit`."""
        self.stage = "backward"
        self.aside.begin()
        run()
        if self.last:
            self.commit()
        else:
            self.stage = "forward"

    def commit(self) -> None:
        """The batch's gradients are complete; a second call does nothing."""
        if not self.committed:
            self.committed = True
            self.aside.merge()


@dataclass
class Recovery:
    """Takes one training through its out-of-memory errors.

    Attributes:
        model: everything whose state a batch changes.
        memory: the device's memory; None where PyTorch counts none.
        log: called with a sentence at each recovery.
        prediction_text: called for the text that a final error ends with: what was predicted, and what to do.
        on_failure: called with the failure as soon as memory ran out.
        frameworks: top-level packages whose objects are no part of the training's state.
    """

    model: nn.Module
    memory: MemoryReader | None = None
    log: Callable[[str], None] = print
    prediction_text: Callable[[], str] = str
    on_failure: Callable[[Failure], None] = lambda _failure: None
    frameworks: tuple[str, ...] = ()
    snapshot: StateSnapshot = field(init=False)

    def __post_init__(self) -> None:
        self.snapshot = StateSnapshot(self.model, self.frameworks)

    def run(
        self, attempt: Callable[[Attempt], T], schedule: MicroBatchSchedule, samples_of: Callable[[], int], what: str
    ) -> T:
        """Call ``attempt`` until it gets through; returns its value.

        Args:
            attempt: runs the batch's forward and backward at the attempt's micro-batch size, each backward inside the
                attempt's ``backward``.
            schedule: the sizes to take; a recovery makes them smaller, for later batches too.
            samples_of: counts the samples of the batch; raises ``CannotSplitError`` where it cannot be split.
            what: the batch, in words, for messages.

        Raises:
            RecoveryFailedError: no smaller micro-batch is left, or the attempt cannot be taken back.
            BaseException: whatever else ``attempt`` raises, as it is.
        """
        while True:
            self.snapshot.take()
            running = Attempt(schedule.size, SetAside(self.snapshot.parameters))
            try:
                outcome = self._try(attempt, running)
                if not isinstance(outcome, Failure):
                    return outcome
                self._take_back(outcome, running, schedule, samples_of, what)
            except LossChangedError as changed:
                if running.committed:
                    raise
                self._take_back_whole(changed, running, schedule)
            finally:
                self.snapshot.forget()

    def _try(self, attempt: Callable[[Attempt], T], running: Attempt) -> T | Failure:
        """The attempt's value, or the out-of-memory error that ended it."""
        try:
            value = attempt(running)
            running.commit()
        except Exception as error:
            if running.committed or not is_out_of_memory(error):
                raise
            failure = drop_traceback(error)
        else:
            return value
        self.on_failure(failure)
        return failure

    def _take_back(
        self, failure: Failure, running: Attempt, schedule: MicroBatchSchedule, samples_of: Callable[[], int], what: str
    ) -> None:
        """As before the attempt, with more free memory and a smaller micro-batch size.

        Raises:
            RecoveryFailedError: that is not possible.
        """
        running.aside.put_back()
        smaller, obstacle = 0, _("there is no smaller micro-batch")
        try:
            smaller = schedule.below(samples_of())
            self.snapshot.check()
            self.snapshot.restore()
        except CannotRollBackError as error:
            obstacle = _("the attempt cannot be repeated: {why}", why=f"{error}. {plan_to_use(smaller)}")
            smaller = 0
        except Exception as error:  # noqa: BLE001 - user code counts the samples
            smaller, obstacle = 0, _("the attempt cannot be repeated: {why}", why=f"{type(error).__name__}: {error}")
        self.snapshot.forget()
        free(self.memory)
        if not smaller:
            raise self._final(
                _(
                    "out of memory in {stage} of {what}, and {why}. The weights are those of the last optimizer step.\n"
                    "The error was {error}\n{trace}",
                    stage=running.stage,
                    what=what,
                    why=obstacle,
                    error=failure,
                    trace=failure.trace,
                )
            )
        self.log(
            _(
                "out of memory in {stage} of {what} ({error}): the attempt is rolled back, and the same batch runs "
                "again in micro-batches of {size} (before: {before}), as do the next ones.",
                stage=running.stage,
                what=what,
                error=failure,
                size=smaller,
                before=schedule.size or _("whole"),
            )
        )
        schedule.size = smaller

    def _take_back_whole(self, changed: LossChangedError, running: Attempt, schedule: MicroBatchSchedule) -> None:
        """As before the attempt: the batch runs again as written, and so do the next ones."""
        running.aside.put_back()
        try:
            self.snapshot.check()
        except CannotRollBackError as why:
            raise self._final(
                _("{changed}\nThe batch cannot be repeated: {why}", changed=changed, why=why)
            ) from changed
        self.snapshot.restore()
        schedule.size = None
        self.log(_("{why}: the batch is rolled back and runs again whole, as do the next ones", why=changed.reason))

    def _final(self, message: str) -> RecoveryFailedError:
        """A clear end, with what was predicted."""
        prediction = self.prediction_text()
        return RecoveryFailedError(f"{message}\n{prediction}" if prediction else message)


def plan_to_use(size: int) -> str:
    """What to train with from the first batch on, where a failed batch cannot be repeated.

    Args:
        size: of the micro-batches that would be the next smaller ones; 0 where there are none.

    Example:
        >>> plan_to_use(4)
        "Start again with a smaller budget=, ...; pin={'micro_batch_size': 4} makes it one of micro-batches"
    """
    said = _("Start again with a smaller budget=, so that the plan fits from the first batch on")
    if not size:
        return said
    return _("{said}; pin={pin} makes it one of micro-batches", said=said, pin={"micro_batch_size": size})
