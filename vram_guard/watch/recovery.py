"""Recovery after a real out-of-memory error: the failed attempt is rolled back, and the same batch runs again.

A batch is an *attempt* at a micro-batch size. Before it, the state that forward changes is remembered; gradients of
earlier batches are set aside before its first backward; what it logs is kept back by the caller. When its gradients
are complete it is *committed*, by all ranks or by none. Where memory runs out before that, on any rank, everything is
as before the attempt, on all ranks, memory is freed, and the same batch runs in smaller micro-batches, as do all
later ones. So no batch is lost or repeated, and every optimizer step has the gradients of its whole batch.

Nothing here knows a framework: an adapter hands in a function that runs one attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from vram_guard.errors import LossChangedError, RecoveryFailedError
from vram_guard.language import _
from vram_guard.watch._gradients import SetAside
from vram_guard.watch._rollback import CannotRollBackError, StateSnapshot
from vram_guard.watch.memory import Failure, MemoryReader, drop_traceback, free
from vram_guard.watch.oom import is_out_of_memory
from vram_guard.watch.rank_coordinator import RankCoordinator, SingleProcess, Verdict

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

#: How many out-of-memory errors one training is taken through before it stops. Halving 256 samples down to one
#: takes eight.
MAX_RECOVERIES = 8


class ElsewhereError(Exception):
    """Another rank ran out of memory; this rank's attempt is rolled back with it."""


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

    recovery: Recovery
    micro_batch_size: int | None
    """Samples of a micro-batch; None: the batch stays whole."""
    aside: SetAside
    synchronise: bool
    """True where the gradients of this batch complete those of an optimizer step."""
    stage: str = "forward"
    committed: bool = False
    last: bool = True
    """True where the next backward completes the gradients of the batch."""
    own_calls: bool = False
    """True if the user's code has called the other ranks itself, on any rank, as far as this one knows."""

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward of one micro-batch; after the last one's, :meth:`commit`."""
        self.before_backward()
        run()
        if self.last:
            self.commit()
        else:
            self.stage = "forward"

    def before_backward(self) -> None:
        """To be called before each backward, once the gradients of the last optimizer step are freed."""
        self.stage = "backward"
        self.aside.begin()

    def commit(self) -> None:
        """The batch's gradients are complete; a second call does nothing.

        Raises:
            ElsewhereError: not so on another rank; :meth:`Recovery.run` knows what to do.
        """
        if self.committed:
            return
        self.meet()
        self.committed = True
        self.aside.merge()
        if self.synchronise:
            self.recovery.say_unused(self.recovery.ranks.average_gradients())

    def meet(self, own: Verdict = Verdict.FINE) -> None:
        """Let the other ranks know how this one is so far; to be called before anything they wait for.

        Raises:
            ElsewhereError: another rank ran out of memory, and this one did not.
            RecoveryFailedError: another rank has stopped.
        """
        verdict, self.own_calls = self.recovery.ranks.agree(own, own_calls=self.own_calls)
        if verdict is Verdict.STOPPED:
            raise self.recovery.stopped_elsewhere()
        if verdict is Verdict.OUT_OF_MEMORY and own is Verdict.FINE:
            raise ElsewhereError

    def calls_others(self) -> None:
        """The user's code is about to call all ranks, which wait for each other."""
        if not self.committed:
            self.own_calls = True
            self.meet()


@dataclass
class _Tally:
    recoveries: int = 0


@dataclass
class Recovery:
    """Takes one training through its out-of-memory errors.

    Attributes:
        model: everything whose state a batch changes.
        ranks: how the ranks settle things.
        memory: the device's memory; None where PyTorch counts none.
        most: how many out-of-memory errors are recovered from, in all.
        log: called with a sentence at each recovery.
        prediction_text: called for the text that a final error ends with: what was predicted, and what to do.
        on_failure: called with the failure as soon as memory ran out on this rank.
        frameworks: top-level packages whose objects are no part of the training's state.
    """

    model: nn.Module
    ranks: RankCoordinator = field(default_factory=SingleProcess)
    memory: MemoryReader | None = None
    most: int = MAX_RECOVERIES
    log: Callable[[str], None] = print
    prediction_text: Callable[[], str] = str
    on_failure: Callable[[Failure], None] = lambda _failure: None
    frameworks: tuple[str, ...] = ()
    snapshot: StateSnapshot = field(init=False)
    _tally: _Tally = field(default_factory=_Tally)
    _left: bool = field(default=False, init=False)
    _said_unused: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.snapshot = StateSnapshot(self.model, self.frameworks)

    def of_this_rank(self) -> Recovery:
        """The same for what a rank does by itself (validation); out-of-memory errors are counted together."""
        return replace(self, ranks=SingleProcess())

    def counted(self) -> tuple[int, bool]:
        """Count one more out-of-memory error: the number of them, and whether that is too many."""
        self._tally.recoveries += 1
        return self._tally.recoveries, self._tally.recoveries > self.most

    def run(
        self,
        attempt: Callable[[Attempt], T],
        schedule: MicroBatchSchedule,
        samples_of: Callable[[], int],
        *,
        synchronise: bool = False,
        what: str,
    ) -> T:
        """Call ``attempt`` until it gets through on all ranks; returns its value.

        Args:
            attempt: runs the batch's forward and backward at the attempt's micro-batch size; calls the attempt's
                ``before_backward`` and ``commit``.
            schedule: the sizes to take; a recovery makes them smaller, for later batches too.
            samples_of: counts the samples of the batch; raises ``CannotSplitError`` where it cannot be split.
            synchronise: whether the ranks' gradients are to be averaged at the commit.
            what: the batch, in words, for messages.

        Raises:
            RecoveryFailedError: no smaller micro-batch is left, there were too many out-of-memory errors, or the
                attempt cannot be taken back. On every rank.
            BaseException: whatever else ``attempt`` raises, as it is.
        """
        self.ranks.share_buffers()
        while True:
            self.snapshot.take()
            running = Attempt(self, schedule.size, SetAside(self.snapshot.parameters), synchronise)
            try:
                outcome = self._try(attempt, running)
                if not isinstance(outcome, Failure):
                    return outcome
                self._take_back(outcome, running, schedule, samples_of, what)
            except LossChangedError as changed:
                if running.committed or not isinstance(self.ranks, SingleProcess):
                    self.leave(changed)
                    raise
                self._take_back_whole(changed, running, schedule)
            finally:
                self.snapshot.forget()

    def _try(self, attempt: Callable[[Attempt], T], running: Attempt) -> T | Failure:
        """The attempt's value, or the out-of-memory error that all ranks now know of."""
        try:
            with self.ranks.noticed(running.calls_others):
                value = attempt(running)
            running.commit()
        except ElsewhereError as error:
            failure = replace(drop_traceback(error), elsewhere=True)
        except LossChangedError:
            raise
        except Exception as error:
            if running.committed or not is_out_of_memory(error):
                self.leave(error)
                if running.committed and is_out_of_memory(error):
                    raise self._after_commit() from error
                raise
            failure = drop_traceback(error)
            self.on_failure(failure)
            running.meet(Verdict.OUT_OF_MEMORY)
        else:
            return value
        return failure

    def _take_back(
        self, failure: Failure, running: Attempt, schedule: MicroBatchSchedule, samples_of: Callable[[], int], what: str
    ) -> None:
        """As before the attempt, with more free memory and a smaller micro-batch size; or an error on all ranks."""
        running.aside.put_back()
        smaller, obstacle = 0, ""
        try:
            smaller = schedule.below(samples_of())
            self.snapshot.check()
            self.snapshot.restore()
        except CannotRollBackError as error:
            obstacle = _("the attempt cannot be repeated: {why}", why=f"{error}. {_plan_to_use(smaller)}")
            smaller = 0
        except Exception as error:  # noqa: BLE001 - user code counts the samples; all ranks must be told
            smaller, obstacle = 0, _("the attempt cannot be repeated: {why}", why=f"{type(error).__name__}: {error}")
        self.snapshot.forget()
        free(self.memory)
        count, too_many = self.counted()
        if smaller and too_many:
            smaller = 0
            obstacle = _(
                "that was out-of-memory error {count}, and max_recoveries is {most}", count=count, most=self.most
            )
        if running.own_calls:
            smaller = 0
            obstacle = _("a batch is not recovered whose step calls other ranks itself, which wait for each other")
        smaller = self.ranks.least(smaller)
        where = _("on another rank") if failure.elsewhere else _("in {stage}", stage=running.stage)
        if not smaller:
            raise self._given_up(failure, where, what, obstacle)
        self.log(
            _(
                "out of memory {where} of {what}{error}: the attempt is rolled back, and the same batch runs "
                "again in micro-batches of {size} (before: {before}), as do the next ones. Recovery {count} "
                "of {most}.",
                where=where,
                what=what,
                error="" if failure.elsewhere else f" ({failure})",
                size=smaller,
                before=schedule.size or _("whole"),
                count=count,
                most=self.most,
            )
        )
        schedule.size = smaller

    def _take_back_whole(self, changed: LossChangedError, running: Attempt, schedule: MicroBatchSchedule) -> None:
        """As before the attempt: the batch runs again as written, and so do the next ones."""
        running.aside.put_back()
        try:
            self.snapshot.check()
        except CannotRollBackError as why:
            raise self.final(_("{changed}\nThe batch cannot be repeated: {why}", changed=changed, why=why)) from changed
        self.snapshot.restore()
        schedule.size = None
        self.log(_("{why}: the batch is rolled back and runs again whole, as do the next ones", why=changed.reason))

    def say_unused(self, parameters: Sequence[nn.Parameter]) -> None:
        """Say once that parameters got no gradient on some rank, where DistributedDataParallel would have stopped."""
        if not parameters or self._said_unused:
            return
        self._said_unused = True
        names = [name for name, own in self.model.named_parameters() if any(own is one for one in parameters)]
        self.log(
            _(
                "these weights got no gradient: {names}. DistributedDataParallel stops with an error there unless it "
                "is given find_unused_parameters=True; while recovery is armed, gradients are averaged without it, and "
                "the training goes on.",
                names=", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
            )
        )

    # --- errors ---------------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """This rank is about to raise: the others learn of it where they next wait for each other."""
        if not self._left and not isinstance(error, RecoveryFailedError):  # which all ranks raise together
            self._left = True
            self.ranks.agree(Verdict.STOPPED)

    def stopped_elsewhere(self) -> RecoveryFailedError:
        """The error that ranks raise when another one has stopped."""
        return RecoveryFailedError(_("another rank stopped with an error; its own output says which"))

    def final(self, message: str) -> RecoveryFailedError:
        """A clear end, with what was predicted."""
        prediction = self.prediction_text()
        return RecoveryFailedError(f"{message}\n{prediction}" if prediction else message)

    def _given_up(self, failure: Failure, where: str, what: str, obstacle: str) -> RecoveryFailedError:
        return self.final(
            _(
                "out of memory {where} of {what}, and {why}. The weights are those of the last optimizer step.\n"
                "The error was {error}\n{trace}",
                where=where,
                what=what,
                why=obstacle or _("there is no smaller micro-batch"),
                error=failure,
                trace="" if failure.elsewhere else failure.trace,
            )
        )

    def _after_commit(self) -> RecoveryFailedError:
        return self.final(
            _(
                "out of memory after backward (in a hook, or in what was logged), when the gradients were "
                "already complete and added up: the batch cannot be rolled back. The weights are those of "
                "the last optimizer step."
            )
        )


def _plan_to_use(size: int) -> str:
    """What to train with from the first batch on, where a failed batch cannot be repeated in smaller parts."""
    said = _("Start again with a smaller budget=, so that the plan fits from the first batch on")
    if not size:
        return said
    return _("{said}; pin={pin} makes it one of micro-batches", said=said, pin={"micro_batch_size": size})
