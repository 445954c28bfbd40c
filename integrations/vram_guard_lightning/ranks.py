"""The processes of a Trainer, see :mod:`vram_guard.capture.ranks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vram_guard.capture import ranks
from vram_guard.capture.ranks import Failure, Outcome

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Failure", "Outcome", "attempt", "from_rank_zero", "gather"]

T = TypeVar("T")


class _Processes:
    """A Trainer's processes, through its strategy."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def rank(self) -> int:
        return self._trainer.global_rank

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    def broadcast(self, value: Any, source: int) -> Any:
        return self._trainer.strategy.broadcast(value, src=source)


def attempt(trainer: Trainer, work: Callable[[], T]) -> Outcome[T]:
    """Do ``work`` on every rank; where it failed on any, the first such failure is everybody's outcome."""
    return ranks.attempt(_Processes(trainer), work)


def gather(trainer: Trainer, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Values must be picklable."""
    return ranks.gather(_Processes(trainer), value)


def from_rank_zero(trainer: Trainer, value: T) -> T:
    """Rank 0's value, on every rank."""
    return ranks.from_rank_zero(_Processes(trainer), value)
