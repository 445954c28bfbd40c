"""One replay with everything that a picture of it needs: addresses, granted bytes, calls to the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vram_guard.allocator import CachingAllocator, Segment, SegmentEvent
from vram_guard.allocator.blocks import PoolBlock
from vram_guard.timeline import Category, Timeline

#: The categories of a stack from the bottom up, what stays longest first.
LAYERS: tuple[Category, ...] = (
    *("parameters", "buffers", "optimizer_states", "gradients"),
    *("batch", "activations", "temporaries", "workspace"),
)


@dataclass(frozen=True)
class Walk:
    """The allocator's actions at each event of a timeline; sizes in bytes."""

    timeline: Timeline
    """The timeline that holds at the batch size (a fresh trace, where the affine law breaks)."""
    sizes: list[int]
    """Requested bytes by block; blocks of 0 bytes never reach the allocator."""
    addresses: list[int]
    """By block; 0 until it is allocated."""
    granted: list[int]
    """By block: bytes that the allocator counts for it; 0 until it is allocated."""
    allocated: list[int]
    """After every event."""
    reserved: list[int]
    """After every event."""
    calls: list[list[SegmentEvent]]
    """By event: the calls to the device that it led to."""
    segments: tuple[Segment, ...]
    """At the end."""
    owners: dict[int, int]
    """Address -> the block that lies there at the end."""


def walk(timeline: Timeline, batch_size: int) -> Walk:
    """Run a timeline through a fresh allocator and note where everything lies."""
    exact = timeline.exact(batch_size)
    sizes, count = list(exact.sizes(batch_size)), len(exact.blocks)
    addresses, granted = [0] * count, [0] * count
    allocated, reserved = list[int](), list[int]()
    calls = list[list[SegmentEvent]]()
    allocator = CachingAllocator()
    held: dict[int, PoolBlock] = {}
    for event in exact.events:
        block = event if event >= 0 else ~event
        before = len(allocator.segment_events)
        if sizes[block]:
            if event < 0:
                allocator.release(held.pop(block))
            else:
                given = allocator.allocate(sizes[block], exact.blocks[block].stream)
                held[block] = given
                addresses[block], granted[block] = given.address, given.size
        calls.append(allocator.segment_events[before:])
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
    owners = {given.address: block for block, given in held.items()}
    return Walk(exact, sizes, addresses, granted, allocated, reserved, calls, tuple(allocator.segments()), owners)


class Stack(NamedTuple):
    """Bytes by category over the events of a timeline."""

    events: list[int]
    """The event that each column shows, ascending."""
    layers: dict[Category, list[int]]
    reserved: list[int]


def stack(timeline: Timeline, batch_size: int, *, most: int) -> Stack:
    """Bytes by category after every event, thinned to ``most`` columns that keep the maxima."""
    walked = walk(timeline, batch_size)
    columns = _highest(walked.allocated, most)
    wanted = set(columns)
    now: dict[Category, int] = dict.fromkeys(LAYERS, 0)
    layers: dict[Category, list[int]] = {category: [] for category in LAYERS}
    for index, event in enumerate(walked.timeline.events):
        block = event if event >= 0 else ~event
        category = walked.timeline.blocks[block].category
        now[category] += walked.granted[block] if event >= 0 else -walked.granted[block]
        if index in wanted:
            for name, held in now.items():
                layers[name].append(held)
    shown = {category: sizes for category, sizes in layers.items() if any(sizes)}
    return Stack(columns, shown, [walked.reserved[index] for index in columns])


def _highest(curve: list[int], most: int) -> list[int]:
    """The indices to draw: all, or the highest of each of ``most`` stretches."""
    if len(curve) <= most:
        return list(range(len(curve)))
    edges = [len(curve) * i // most for i in range(most + 1)]
    return [max(range(*edge), key=curve.__getitem__) for edge in pairwise(edges)]
