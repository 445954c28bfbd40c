"""replay: a sequence of allocations and frees, run through the caching allocator."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vram_guard.allocator._caching import CachingAllocator, SimulatedOutOfMemory
from vram_guard.allocator._driver import Placement
from vram_guard.allocator._settings import AllocatorSettings
from vram_guard.allocator.blocks import PoolBlock, Segment
from vram_guard.errors import InvalidInputError
from vram_guard.language import _


@dataclass(frozen=True)
class ReplayFailure:
    """The event at which a replay ran out of its capacity; sizes in bytes."""

    event: int
    """Index of the event that failed."""
    requested: int
    """The size that that event asked for."""
    allocated: int
    reserved: int
    """Still reserved after every cached segment that could be given back was given back."""


class StretchPeak(NamedTuple):
    """The peaks within a stretch of the events; sizes in bytes, what was there at its beginning included."""

    allocated: int
    reserved: int
    event: int
    """Index of the event at which the allocated bytes first reached their maximum; the first one where none rose."""


@dataclass(frozen=True)
class Replay:
    """The result of a sequence of allocations and frees; sizes in bytes.

    After a failure everything holds for the events before it.
    """

    peak_allocated: int
    peak_reserved: int
    peak_event: int
    """Index of the event at which the allocated bytes first reached their maximum; 0 if none were."""
    peak_live: Mapping[int, int] = field(repr=False)
    """PoolBlock index -> bytes the allocator counts for it, of all alive then; sums to ``peak_allocated``."""
    failure: ReplayFailure | None = None
    allocated_curve: tuple[int, ...] | None = field(default=None, repr=False)
    """Allocated bytes after every event, where a curve was asked for."""
    reserved_curve: tuple[int, ...] | None = field(default=None, repr=False)
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    """The segments at the end, where a curve was asked for."""
    stretches: tuple[StretchPeak, ...] = ()
    """The peaks of each stretch that was begun, in order."""


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    curve: bool = False,
    streams: Sequence[int] | None = None,
    optional: Container[int] = (),
    starts: Sequence[int] = (0,),
    placement: Placement = "above",
) -> Replay:
    """Run allocations and frees through a fresh caching allocator.

    Args:
        events: ``i >= 0``: block ``i`` is allocated (once); ``~i`` (negative): block ``i`` is freed.
        sizes: requested bytes of every block. Blocks of 0 bytes never reach the allocator: their events are
            passed over.
        settings: the allocator's settings; None: PyTorch's defaults.
        capacity: bytes that may be reserved; None: no limit.
        curve: also note allocated and reserved bytes after every event, and the segments at the end.
        streams: the stream of every block; None: all on one.
        optional: blocks that are done without where they do not fit; whatever was given back to make room for them
            stays given back.
        starts: the events at which stretches begin whose peaks are wanted, ascending from 0.
        placement: where CUDA puts new segments: "below" or "above" the earlier ones.

    Raises:
        InvalidInputError: for a negative size, a block that is not in ``sizes``, is allocated twice, or is
            freed while it is not allocated.
    """
    run = _Replay(list(map(operator.index, events)), list(map(operator.index, sizes)), streams, optional)
    allocator = CachingAllocator(settings, capacity, placement=placement)
    curves: tuple[list[int], list[int]] | None = ([], []) if curve else None
    stretches = []
    failure = None
    # Moving a model to the GPU frees nothing there, and kernels soon do: the last block before that is one of theirs.
    first = max(0, next((index for index, event in enumerate(run.events) if event < 0), len(run.events) + 1) - 1)
    for start, end in zip(starts, (*starts[1:], len(run.events)), strict=True):
        allocator.restart_peaks()
        run.peak, run.peak_event = allocator.allocated, start
        middle = min(max(start, first), end)
        failure = run.step_through(allocator, curves, start, middle) if start < middle else None
        if middle == first:
            allocator.kernels_run()
        if failure is None and (middle < end or start == end):
            failure = run.step_through(allocator, curves, middle, end)
        stretches.append(StretchPeak(allocator.peak_allocated, allocator.peak_reserved, run.peak_event))
        if failure is not None:
            break
    highest = max(stretches, key=lambda stretch: stretch.allocated)
    run.peak_event = highest.event
    return Replay(
        peak_allocated=highest.allocated,
        peak_reserved=max(stretch.reserved for stretch in stretches),
        peak_event=highest.event,
        peak_live=run.alive_at_peak(),
        failure=failure,
        allocated_curve=tuple(curves[0]) if curves else None,
        reserved_curve=tuple(curves[1]) if curves else None,
        segments=tuple(allocator.segments()) if curves else (),
        stretches=tuple(stretches),
    )


class _Replay:
    """The blocks of a running replay."""

    def __init__(
        self, events: list[int], sizes: list[int], streams: Sequence[int] | None, optional: Container[int]
    ) -> None:
        if sizes and min(sizes) < 0:
            raise InvalidInputError(
                _("block {index} has a negative size: {size} bytes", index=sizes.index(min(sizes)), size=min(sizes))
            )
        if events and not -len(sizes) <= min(events) <= max(events) < len(sizes):
            raise InvalidInputError(
                _("events name blocks that have no size: there are {count} sizes", count=len(sizes))
            )
        if streams is not None and len(streams) != len(sizes):
            raise InvalidInputError(
                _(
                    "there are {streams} streams for {sizes} sizes: give one for each",
                    streams=len(streams),
                    sizes=len(sizes),
                )
            )
        self.events = events
        self.sizes = sizes
        self.streams = streams or [0] * len(sizes)
        self.optional = optional
        #: Bytes that the allocator counted for each block when it was allocated; 0: not yet.
        self.granted = [0] * len(sizes)
        self.blocks: list[PoolBlock | None] = [None] * len(sizes)
        self.peak = self.peak_event = 0

    def step_through(
        self, allocator: CachingAllocator, curves: tuple[list[int], list[int]] | None, start: int, end: int
    ) -> ReplayFailure | None:
        """A stretch of the events in order. The loop is the hot path of all predictions: hence the local names."""
        sizes, streams, granted = self.sizes, self.streams, self.granted
        blocks = self.blocks
        allocate, release = allocator.allocate, allocator.release
        peak = self.peak
        for index, event in enumerate(self.events[start:end], start):
            if event >= 0:
                size = sizes[event]
                if size:
                    if granted[event]:
                        raise InvalidInputError(
                            _("event {index} allocates block {block} for the second time", index=index, block=event)
                        )
                    try:
                        blocks[event] = block = allocate(size, streams[event])
                    except SimulatedOutOfMemory as error:
                        if event not in self.optional:
                            return ReplayFailure(index, size, error.allocated, error.reserved)
                        sizes[event] = 0  # its end is passed over too
                    else:
                        granted[event] = block.size
                        if allocator.allocated > peak:
                            self.peak = peak = allocator.allocated
                            self.peak_event = index
            elif sizes[~event]:
                held = blocks[~event]
                if held is None:
                    raise InvalidInputError(
                        _("event {index} frees block {block}, which is not allocated then", index=index, block=~event)
                    )
                release(held)
                blocks[~event] = None
            if curves is not None:
                curves[0].append(allocator.allocated)
                curves[1].append(allocator.reserved)
        return None

    def alive_at_peak(self) -> dict[int, int]:
        """PoolBlock index -> granted bytes of the blocks that were alive right after the peak event."""
        alive: dict[int, int] = {}
        for event in self.events[: self.peak_event + 1]:
            if event < 0:
                alive.pop(~event, None)
            elif self.granted[event]:
                alive[event] = self.granted[event]
        return alive
