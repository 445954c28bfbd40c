"""The largest batch of one training step on each card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from vram_guard.allocator import Placement
from vram_guard.budget import GPU
from vram_guard.limits import LARGEST_BATCH_ASKED
from vram_guard.timeline import Timeline


@dataclass(frozen=True)
class OnGpu:
    """The largest batch on one card. Bytes are ints."""

    gpu: GPU
    usable: int
    largest_batch: int
    """0: not even one sample, or the answer is only a lower bound."""
    peak: int
    """Predicted at the largest batch; at one sample where none fits."""
    known: bool = True
    """False where the prediction is a lower bound only."""


def on_every_gpu(
    trace: Callable[[tuple[int, int]], Timeline],
    gpus: Sequence[GPU],
    *,
    limit: int = LARGEST_BATCH_ASKED,
    margin: float | None = None,
) -> tuple[OnGpu, ...]:
    """The largest batch on each card, as written.

    Args:
        trace: compute capability -> the step's timeline on such a card; called for those that no earlier
            timeline serves (:meth:`vram_guard.Timeline.of_capability`).
        gpus: the cards.
        limit: the largest batch size that is considered.
        margin: the share of each card to leave free; None: the default.
    """
    from vram_guard.budget import Budget

    traced: list[Timeline] = []

    @cache
    def timeline_for(capability: tuple[int, int]) -> Timeline:
        same = next(filter(None, (one.of_capability(capability) for one in traced)), None)
        if same is None:
            same = trace(capability)
            traced.append(same)
        return same

    @cache
    def held(
        capability: tuple[int, int], multiprocessors: int | None, placement: Placement | None, budget: Budget
    ) -> tuple[int, int]:
        """(Largest batch, peak), which cards of one kind and size share."""
        timeline = timeline_for(capability).on(multiprocessors, placement)
        largest = timeline.max_batch_size(budget, limit=limit)
        return largest, timeline.replay(max(largest, 1)).peak_reserved

    def one(gpu: GPU) -> OnGpu:
        timeline = timeline_for(gpu.compute_capability)
        budget = Budget.of(gpu, margin).for_tier(timeline.tier, timeline.network)
        largest, peak = held(gpu.compute_capability, gpu.multiprocessors, gpu.placement, budget)
        return OnGpu(gpu, budget.usable, largest, peak, timeline.tier != "formula")

    return tuple(map(one, gpus))
