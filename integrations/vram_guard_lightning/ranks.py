"""One decision for all processes of a distributed training.

Every rank plans for itself, so that the user's hooks run on all ranks alike; then the ranks exchange what
came out. The number of exchanges does not depend on what happened on a rank, so that a failure on one stops
all and hangs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from vram_guard import errors

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error on some rank, in a form that travels between processes."""

    kind: str
    message: str
    rank: int

    @property
    def unsupported(self) -> bool:
        """Whether the training cannot be predicted, as opposed to being wrong."""
        return self.kind == errors.UnsupportedStepError.__name__

    def as_error(self) -> errors.VramGuardError:
        """The same error for a rank where it did not happen."""
        known = getattr(errors, self.kind, None)
        kind = known if isinstance(known, type) and issubclass(known, errors.VramGuardError) else None
        name = "" if kind is not None else f"{self.kind}: "
        return (kind or errors.VramGuardError)(f"rank {self.rank} could not plan: {name}{self.message}")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What an attempt came to on this rank, agreed upon by all: a value, or the same failure everywhere."""

    value: T | None
    failure: Failure | None
    error: Exception | None = None
    """The original error, with its traceback, on the rank where it happened."""

    def unwrap(self) -> T:
        """The value; on every rank the error, if any rank failed."""
        if self.failure is not None:
            raise self.error or self.failure.as_error()
        return self.value  # type: ignore[return-value]


def attempt(trainer: Trainer, work: Callable[[], T]) -> Outcome[T]:
    """Do ``work`` on every rank; where it failed on any, the first such failure is everybody's outcome."""
    value, error, failure = None, None, None
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001 - the user's own code runs in it and may raise anything
        error = caught
        failure = Failure(_kind(caught), str(caught), trainer.global_rank)
    failed = [found for found in gather(trainer, failure) if found is not None]
    if not failed:
        return Outcome(value, None)
    first = failed[0]
    return Outcome(None, first, error if first.rank == trainer.global_rank else None)


def gather(trainer: Trainer, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Values must be picklable."""
    if trainer.world_size == 1:
        return [value]
    ranks = range(trainer.world_size)
    return [trainer.strategy.broadcast(value, src=rank) for rank in ranks]


def from_rank_zero(trainer: Trainer, value: T) -> T:
    """Rank 0's value, on every rank."""
    return value if trainer.world_size == 1 else trainer.strategy.broadcast(value, src=0)


def _kind(error: Exception) -> str:
    """The nearest class that every rank knows: our own for our own subclasses, else its own name."""
    own = [base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base]
    return own[0] if own else type(error).__name__
