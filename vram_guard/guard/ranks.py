"""One decision for all processes of a distributed training.

Rank 0 plans in a copy of its process, the others read their training meanwhile, and what came out is exchanged.
The number of exchanges does not depend on what happened on a rank, so that a failure on one stops all and hangs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from vram_guard import errors
from vram_guard.forks.fork import is_ours, line_that_failed
from vram_guard.guard.arrivals import all_arrive, late, patience
from vram_guard.language import _

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one training, as its framework lets them talk."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank ``source``, on every rank; values are picklable."""


class ProcessRanks:
    """The processes of torch.distributed's default group; one where that is not used."""

    @property
    def rank(self) -> int:
        """See :class:`Ranks`."""
        return int(dist.get_rank()) if _is_used() else 0

    @property
    def world_size(self) -> int:
        """See :class:`Ranks`."""
        return int(dist.get_world_size()) if _is_used() else 1

    def broadcast(self, value: Any, source: int) -> Any:
        """See :class:`Ranks`."""
        holder = [value]
        dist.broadcast_object_list(holder, src=source)
        return holder[0]


def _is_used() -> bool:
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class RankFailure:
    """An error on some rank, in a form that travels between processes."""

    kind: str
    message: str
    rank: int
    line: str = ""
    """The innermost line of the user's code that it passed, "train.py, line 12"; "" if there is none."""
    ours: bool = False
    """This package raised it: its traceback is of use to us."""

    @property
    def unsupported(self) -> bool:
        """True if the training cannot be predicted; False if it is wrong."""
        kind = getattr(errors, self.kind, None)
        return isinstance(kind, type) and issubclass(kind, errors.UnsupportedStepError)

    @property
    def foreign(self) -> bool:
        """True if the user's own code, or a library, raised it."""
        return not hasattr(errors, self.kind)

    def as_error(self) -> errors.VramGuardError:
        """The same error for a rank where it did not happen."""
        known = getattr(errors, self.kind, None)
        kind = known if isinstance(known, type) and issubclass(known, errors.VramGuardError) else None
        name = "" if kind is not None else f"{self.kind}: "
        return (kind or errors.VramGuardError)(
            _("rank {rank} could not plan: {problem}", rank=self.rank, problem=f"{name}{self.message}")
        )


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of an attempt, agreed upon by all ranks: a value, or the same failure everywhere."""

    value: T | None
    failure: RankFailure | None
    error: Exception | None = None
    """The original error, with its traceback, on the rank where it happened."""

    def unwrap(self) -> T:
        """The value; on every rank the error, if any rank failed."""
        if self.failure is not None:
            raise self.error or self.failure.as_error()
        return self.value  # type: ignore[return-value]


def attempt(ranks: Ranks, work: Callable[[], T], most_seconds: float = 0.0) -> Outcome[T]:
    """Do ``work`` on every rank; where it failed on any, or one is late, that failure is everybody's outcome.

    Args:
        ranks: of the training.
        work: what is done.
        most_seconds: that another rank may need for it, where that is more than ranks are apart anyhow.

    Raises:
        LostRankError: the process through which the ranks talk has ended.
    """
    value, error, failure = None, None, None
    began = time.monotonic()
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001 - the user's own code runs in it and may raise anything
        error = caught
        failure = RankFailure(_kind(caught), str(caught), ranks.rank, line_that_failed(caught), is_ours(caught))
    waited = max(patience(time.monotonic() - began), most_seconds)
    if ranks.world_size > 1 and not all_arrive(ranks.world_size, waited):
        return Outcome(
            None, RankFailure(errors.LostCopyError.__name__, late(), ranks.rank), errors.LostCopyError(late())
        )
    failed = [found for found in gather(ranks, failure) if found is not None]
    if not failed:
        return Outcome(value, None)
    first = failed[0]
    return Outcome(None, first, error if first.rank == ranks.rank else None)


def gather(ranks: Ranks, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Values must be picklable."""
    if ranks.world_size == 1:
        return [value]
    return [ranks.broadcast(value, rank) for rank in range(ranks.world_size)]


def from_rank_zero(ranks: Ranks, value: T) -> T:
    """Rank 0's value, on every rank."""
    return value if ranks.world_size == 1 else ranks.broadcast(value, 0)


def _kind(error: Exception) -> str:
    """The nearest class that every rank knows: our own for our own subclasses, else its own name."""
    own = [base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base]
    return own[0] if own else type(error).__name__
