"""The batch-size curve: the reserved peak of a step over its batch size, and how far each card's memory carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import GPU, Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_BATCH_ASKED
from vram_guard.timeline import Timeline, largest_that_fits

#: Drawn where no cards are named: common ones from 8 to 80 GB, one of each size.
COMMON_CARDS = ("RTX 3070", "RTX 3060 12GB", "RTX 4080", "RTX 4090", "L40S", "A100 SXM4 80GB")

#: Points of the curve between 1 and its end.
POINTS = 40


@dataclass(frozen=True)
class Limit:
    """The largest batch of the step within one budget; amounts in bytes."""

    name: str
    usable: int
    largest: int
    """The largest batch size that fits as the step was traced; 0: not even one sample."""
    peak: int | None
    """The reserved peak there; None where nothing fits."""

    @property
    def open_ended(self) -> bool:
        """True where the search ended before the memory did."""
        return self.largest >= LARGEST_BATCH_ASKED


@dataclass(frozen=True)
class BatchCurve:
    """Reserved peaks, in bytes, at ascending batch sizes; and the limits, smallest first."""

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]
    limits: tuple[Limit, ...]


def batch_curve(
    timeline: Timeline,
    budgets: Iterable[Budget | GPU | str | int] = COMMON_CARDS,
    *,
    at: int = 1,
    settings: AllocatorSettings | None = None,
) -> BatchCurve:
    """Peaks over batch sizes, as far as the largest budget reaches.

    A timeline that has to be traced anew for each batch size (``timeline.retrace``) takes a trace for every point.

    Args:
        timeline: of the step.
        budgets: cards by name, budgets or amounts.
        at: a batch size that is to be on the curve, such as the user's own.
        settings: the allocator's settings; None: PyTorch's defaults.

    Raises:
        InvalidInputError: no budgets, or one that is none.
    """
    from vram_guard.budget import Budget

    resolved = [(budget, Budget.of(budget).for_tier(timeline.tier, timeline.network)) for budget in budgets]
    if not resolved:
        raise InvalidInputError(_("a batch-size curve needs at least one GPU or budget"))

    @cache
    def peak(size: int) -> int:
        return timeline.replay(size, settings=settings).peak_reserved

    limits = [_limit(_name(given, budget), budget, timeline, peak) for given, budget in resolved]
    end = max(at, *(limit.largest for limit in limits), 2)
    wanted = {1, at, end, *(limit.largest for limit in limits if limit.largest)}
    points = POINTS if timeline.retrace is None else 0
    wanted.update(1 + (end - 1) * i // points for i in range(points))
    sizes = tuple(sorted(wanted))
    return BatchCurve(sizes, tuple(map(peak, sizes)), tuple(sorted(limits, key=lambda limit: limit.usable)))


def close_together(limits: Iterable[Limit], share: float = 0.07) -> list[list[Limit]]:
    """The limits in groups, each of whose lines lies within this share of the whole height of the next one."""
    groups: list[list[Limit]] = []
    ordered = sorted(limits, key=lambda limit: limit.usable)
    for limit in ordered:
        if groups and limit.usable - groups[-1][-1].usable <= share * ordered[-1].usable:
            groups[-1].append(limit)
        else:
            groups.append([limit])
    return groups


def _limit(name: str, budget: Budget, timeline: Timeline, peak: Callable[[int], int]) -> Limit:
    largest = largest_that_fits(
        lambda size: budget.holds(peak(size), timeline.tier, timeline.network), LARGEST_BATCH_ASKED
    )
    return Limit(name, budget.usable, largest, peak(largest) if largest else None)


def _name(given: object, budget: Budget) -> str:
    if budget.gpu is not None and budget.context:
        return budget.gpu.name  # the whole card
    if isinstance(given, str):
        return given
    from vram_guard.units import format_bytes

    return format_bytes(budget.usable)
