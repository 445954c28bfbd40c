"""One replay with everything that a picture of it needs: addresses, granted bytes, calls to the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory

if TYPE_CHECKING:
    from vram_guard.allocator import Segment, SegmentEvent
    from vram_guard.allocator.blocks import PoolBlock
    from vram_guard.timeline import Timeline


@dataclass(frozen=True)
class Walk:
    """What the allocator did at each event of a timeline; sizes in bytes.

    Where a capacity is too small, it ends before the event that failed.
    """

    timeline: Timeline
    """The timeline that holds at ``batch_size`` (a fresh trace, where the affine law breaks)."""
    batch_size: int
    sizes: list[int]
    """Requested bytes by block; blocks of 0 bytes never reach the allocator."""
    addresses: list[int]
    """By block; 0 until it is allocated."""
    granted: list[int]
    """By block: bytes that the allocator counts for it; 0 until it is allocated."""
    allocated: list[int] = field(default_factory=list)
    """After every event."""
    reserved: list[int] = field(default_factory=list)
    """After every event."""
    calls: list[tuple[int, SegmentEvent]] = field(default_factory=list)
    """(index of the event that led to it, call to the device), in order."""
    segments: tuple[Segment, ...] = ()
    """At the end."""


def walk(
    timeline: Timeline,
    batch_size: int,
    *,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
) -> Walk:
    """Run a timeline through a fresh allocator and note where everything lies."""
    exact = timeline.exact(batch_size)
    count = len(exact.blocks)
    notes = Walk(exact, batch_size, exact.sizes(batch_size), [0] * count, [0] * count)
    allocator = CachingAllocator(settings, capacity)
    held: dict[int, PoolBlock] = {}
    for index, event in enumerate(exact.events):
        block = event if event >= 0 else ~event
        if notes.sizes[block]:
            if event < 0:
                allocator.release(held.pop(block))
            else:
                try:
                    given = allocator.allocate(notes.sizes[block])
                except SimulatedOutOfMemory:
                    break
                held[block] = given
                notes.addresses[block], notes.granted[block] = given.address, given.size
        notes.calls.extend((index, call) for call in allocator.segment_events[len(notes.calls) :])
        notes.allocated.append(allocator.allocated)
        notes.reserved.append(allocator.reserved)
    object.__setattr__(notes, "segments", tuple(allocator.segments()))
    return notes
