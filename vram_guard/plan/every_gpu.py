"""The largest batch of one training step on each card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from vram_guard.allocator import Placement
from vram_guard.budget import GPU
from vram_guard.limits import LARGEST_BATCH_ASKED
from vram_guard.step import checked_count
from vram_guard.timeline import Timeline, largest_that_fits


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

    checked_count("limit", limit)
    traced: list[Timeline] = []

    @cache
    def timeline_for(capability: tuple[int, int]) -> Timeline:
        same = next(filter(None, (one.of_capability(capability) for one in traced)), None)
        if same is None:
            same = trace(capability)
            traced.append(same)
        return same

    seen: defaultdict[int, dict[int, int]] = defaultdict(dict)
    """By the events of a trace: batch size -> reserved peak on the last card that was asked; cards differ little."""

    replayed: dict[tuple[object, ...], tuple[Timeline, int]] = {}
    """By what a replay depends on, with a timeline whose events stay alive for it."""

    @cache
    def peak_at(card: tuple[tuple[int, int], int | None, Placement | None], size: int) -> int:
        timeline = timeline_for(card[0])
        here = timeline.on(*card[1:]).exact(size)
        same = id(here.events), tuple(here.sizes(size)), here.placement
        if same not in replayed:
            replayed[same] = here, here.replay(size).peak_reserved
        peak = replayed[same][1]
        seen[id(timeline.events)][size] = peak
        return peak

    @cache
    def least_at(capability: tuple[int, int], size: int) -> int:
        """Bytes that are asked for and not given back, at the most, on any such card: no replay reserves less."""
        here = timeline_for(capability).exact(size)
        sizes = [0 if block.unknown else block.size.at(size) for block in here.blocks]
        return max(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in here.events), default=0)

    def one(gpu: GPU) -> OnGpu:
        card = gpu.compute_capability, gpu.multiprocessors, gpu.placement
        timeline = timeline_for(gpu.compute_capability)
        tier, network = timeline.tier, timeline.network
        budget = Budget.of(gpu, margin).for_tier(tier, network)
        near = max((size for size, peak in seen[id(timeline.events)].items() if peak <= budget.usable), default=1)

        def fits(size: int) -> bool:
            if not budget.holds(least_at(gpu.compute_capability, size), tier, network):
                return False  # as most sizes that do not fit: that takes no replay
            return budget.holds(peak_at(card, size), tier, network)

        largest = largest_that_fits(fits, limit, near)
        return OnGpu(gpu, budget.usable, largest, peak_at(card, max(largest, 1)), tier != "formula")

    return tuple(map(one, gpus))
