"""Choice of the batch size: of those that fit the smallest that is as fast as any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan.techniques import splits_of
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.timeline import Timeline
    from vram_guard.watch.throughput import MeasuredBatch

#: Throughputs this close are the same: models and clocks are no better.
SAME = 0.05

#: The share of the memory that a larger batch may fill, the guides' 60 to 80%; never beyond the usable part.
FILLED = 0.8

#: Larger batches than this multiple of the present one are another training, whatever the GPU could do: the linear rule
#: holds with a warm-up, and not without end (Goyal et al. 2017, sec. 2 and 5.1).
MOST_GROWTH = 8


@dataclass(frozen=True)
class BatchChoice:
    """The batch size to write, and why."""

    batch_size: int
    accumulate: int
    """Micro-batches per optimizer step."""
    reason: str
    fits: bool = True
    optimizer: str = ""
    """Name of the optimizer's class, as the step has it."""
    budget: Budget | None = None
    """The budget that it was held against, with the margin of this kind of step; None: it was measured."""


def choose_batch(
    timeline: Timeline,
    batch_size: int,
    budget: Budget,
    *,
    accumulate: int = 1,
    can_accumulate: bool = False,
) -> BatchChoice:
    """The batch size for a budget, from a prediction.

    Args:
        timeline: of the step in the precision that it will have.
        batch_size: as written.
        budget: what may be used.
        accumulate: micro-batches per optimizer step as written.
        can_accumulate: whether the config can say how many micro-batches make a step: a batch that is too large is then
            split and the training stays what it is; else it gets smaller.
    """
    largest = timeline.max_batch_size(budget)
    budget = budget.for_tier(timeline.tier, timeline.network)

    def chosen(size: int, reason: str, parts: int = 1, *, fits: bool = True) -> BatchChoice:
        return BatchChoice(size, accumulate * parts, reason, fits, timeline.optimizer, budget)

    needed, usable = format_bytes(timeline.at(batch_size).peak_reserved), format_bytes(budget.usable)
    if largest == 0:
        needed = format_bytes(timeline.at(1).peak_reserved)
        said = _("not even one sample fits: {needed} of {usable}", needed=needed, usable=usable)
        return chosen(batch_size, said, fits=False)
    if batch_size <= largest:
        return chosen(*_larger(timeline, batch_size, budget))
    why = _("batch {batch} needs {needed} of {usable}", batch=batch_size, needed=needed, usable=usable)
    if not can_accumulate:
        return chosen(largest, _("{why}: {largest} is the largest that fits", why=why, largest=largest))
    parts = next(count for count in splits_of(batch_size) if batch_size // count <= largest)
    return chosen(
        batch_size // parts, _("{why}: {parts} micro-batches make the same step", why=why, parts=parts), parts
    )


def _larger(timeline: Timeline, batch_size: int, budget: Budget) -> tuple[int, str]:
    """The smallest multiple within the target that the model of a step's time finds as fast as any, and why."""
    filled = min(budget.usable, int(FILLED * budget.total))
    sizes = [batch_size]
    while sizes[-1] < MOST_GROWTH * batch_size and timeline.replay(2 * sizes[-1]).peak_reserved <= filled:
        sizes.append(2 * sizes[-1])
    if len(sizes) == 1:
        share = f"{timeline.at(batch_size).peak_reserved / budget.usable:.0%}"
        return batch_size, _("it fills {share} of the memory already", share=share)
    speeds = modelled_speeds(timeline, sizes, budget)
    if not speeds:
        return batch_size, _("how its time grows with the batch is not known")
    size = smallest_of_the_fastest(speeds)
    return size, _(
        "{at} of {usable} at its peak; x {gain} samples per second by the step-time model",
        at=format_bytes(timeline.at(size).peak_reserved),
        usable=format_bytes(budget.usable),
        gain=f"{speeds[size] / speeds[batch_size]:.2f}",
    )


def modelled_speeds(timeline: Timeline, sizes: Iterable[int], budget: Budget) -> dict[int, float]:
    """Samples a second by batch size; none where the timeline does not say what its operators compute."""
    from vram_guard.plan.step_time import step_seconds

    try:
        return {size: size / step_seconds(timeline, size, budget.gpu).seconds for size in sizes}
    except (InvalidInputError, ZeroDivisionError):
        return {}


def smallest_of_the_fastest(speeds: dict[int, float]) -> int:
    """The smallest batch that is as fast as the fastest one, within :data:`SAME`."""
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= (1 - SAME) * best)


def chosen_by_measurement(
    results: Iterable[MeasuredBatch], accumulate: int, device: str, optimizer: str = ""
) -> BatchChoice:
    """The smallest batch that was measured as fast as any.

    Raises:
        InvalidInputError: none of them ran.
    """
    speeds = {one.batch_size: one.samples_per_second for one in results if one.samples_per_second is not None}
    if not speeds:
        raise InvalidInputError(_("no batch size ran on {device}: even the smallest ran out of memory", device=device))
    chosen = smallest_of_the_fastest(speeds)
    said = _("measured on {device}: {speed} samples per second", device=device, speed=f"{speeds[chosen]:.1f}")
    return BatchChoice(chosen, accumulate, said, optimizer=optimizer)
