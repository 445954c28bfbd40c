"""compare: a recorded run and its simulation, segment by segment."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vram_guard.allocator._caching import CachingAllocator
from vram_guard.allocator._driver import ALIGNMENT
from vram_guard.allocator._expandable import ADDRESS_SPACE
from vram_guard.allocator._recording import Recording
from vram_guard.allocator._settings import AllocatorSettings
from vram_guard.allocator.blocks import PoolBlock, Segment, SegmentType, TraceEntry
from vram_guard.language import _


class Divergence(NamedTuple):
    """The first point at which the simulation left the recorded run."""

    event: int
    """Position of the entry in the snapshot's trace."""
    recorded: str
    simulated: str


class SegmentCount(NamedTuple):
    """The number of segments of one kind at the end of the recorded and of the simulated run."""

    segment_type: SegmentType
    stream: int
    total_size: int
    """Bytes of each."""
    recorded: int
    simulated: int


@dataclass(frozen=True)
class RecordingComparison:
    """A recorded run and its simulation; sizes in bytes."""

    recorded_peak_reserved: int
    """Counted from the recorded segments."""
    simulated_peak_reserved: int
    simulated_peak_allocated: int
    """Bytes in live blocks at their maximum; where no block is displaced, those of the recorded run."""
    counts: tuple[SegmentCount, ...]
    """The segments at the end, by type, stream and size."""
    simulated: tuple[Segment, ...]
    """The simulated segments at the end, by address."""
    first_difference: Divergence | None
    """The first action at which the two took or kept different segments."""
    first_displaced_block: Divergence | None
    """The first block that the simulation put elsewhere, while the segments may well be the same."""

    @property
    def same_segments(self) -> bool:
        """True if the segments were the same all along and at the end."""
        return self.first_difference is None and all(count.recorded == count.simulated for count in self.counts)


def compare(recording: Recording, settings: AllocatorSettings | None = None) -> RecordingComparison:
    """Follow a recorded run with the simulation, from the segments that it began with.

    New segments get the addresses that CUDA gave them. What the run gave back to the device (``empty_cache``,
    or memory running out) is given back when it did: why it did so depends on the whole device, which no
    trace shows. One thing gets lost: where memory runs out within an allocation, with max_split_size and
    expandable segments both on, torch passes over the ragged ends that unmapping leaves, and this does not.

    Args:
        recording: what :func:`read_recording` answers.
        settings: the allocator's settings; None: those of the recording.
    """
    follower = _Follower(recording, settings or recording.settings)
    for entry in recording.trace:
        follower.follow(entry)
    simulated = tuple(follower.allocator.segments())
    return RecordingComparison(
        recorded_peak_reserved=follower.recorded_peak,
        simulated_peak_reserved=follower.allocator.peak_reserved,
        simulated_peak_allocated=follower.allocator.peak_allocated,
        counts=_counts(recording.final, simulated),
        simulated=simulated,
        first_difference=follower.first_difference,
        first_displaced_block=follower.first_displaced,
    )


class _Follower:
    """The simulated allocator and what is known of the recorded one, while a trace is walked through."""

    def __init__(self, recording: Recording, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings, place=self._place)
        self.blocks: dict[int, PoolBlock] = self.allocator.restore(recording.initial)
        self.recorded = self.recorded_peak = self.allocator.reserved
        self.first_difference: Divergence | None = None
        self.first_displaced: Divergence | None = None
        #: Recorded growth since the last allocation: it belongs to the one that follows.
        self._growth: deque[TraceEntry] = deque()
        self._unmapping = False
        ends = [entry.address + entry.size for entry in recording.trace]
        ends += [segment.end for segment in recording.initial]
        #: Above everything the recording knows: for segments that only the simulation takes.
        self._beyond = -(-max(ends, default=0) // ALIGNMENT) * ALIGNMENT + ADDRESS_SPACE
        self._freed_by = recording.freed_by
        if not recording.initial:
            for block in recording.existing:
                self.blocks[block.address] = self.allocator.allocate(block.size, block.stream)

    def follow(self, entry: TraceEntry) -> None:
        """Do what the recorded run did."""
        if entry.action != "segment_unmap":
            self._unmapping = False
        if entry.action == "alloc":
            self._allocate(entry)
        elif entry.action in ("segment_alloc", "segment_map"):
            self.recorded += entry.size
            self.recorded_peak = max(self.recorded_peak, self.recorded)
            self._growth.append(entry)
        elif entry.action in ("segment_free", "segment_unmap"):
            self.recorded -= entry.size
            self._give_back(entry)
        elif entry.action == self._freed_by:
            self.allocator.release(self.blocks.pop(entry.address))

    def _allocate(self, entry: TraceEntry) -> None:
        recorded = [(each.action, each.size) for each in self._growth]
        before = len(self.allocator.segment_events)
        block = self.allocator.allocate(entry.size, entry.stream)
        self._growth.clear()
        self.blocks[entry.address] = block
        simulated = [(each.action, each.size) for each in self.allocator.segment_events[before:]]
        if recorded != simulated:
            self._differ(entry, _told(recorded), _told(simulated))
        elif self.recorded != self.allocator.reserved:
            self._differ(entry, *(_("{size} bytes reserved", size=n) for n in (self.recorded, self.allocator.reserved)))
        if block.address != entry.address and self.first_displaced is None:
            self.first_displaced = Divergence(entry.position, f"{entry.address:#x}", f"{block.address:#x}")

    def _give_back(self, entry: TraceEntry) -> None:
        if entry.action == "segment_unmap":
            # One release unmaps everything that is free; the trace lists it page by page.
            if not self._unmapping:
                self.allocator.empty_cache()
            self._unmapping = True
        elif not (self.allocator.give_back_segment(entry.address) or self._give_back_alike(entry)):
            self._differ(entry, _("gave back {size} bytes", size=entry.size), _("has no free segment of that size"))

    def _give_back_alike(self, entry: TraceEntry) -> bool:
        """After the two have parted: any free segment of the same size and stream."""
        return any(
            segment.total_size == entry.size
            and segment.stream == entry.stream
            and self.allocator.give_back_segment(segment.address)
            for segment in self.allocator.segments()
        )

    def _place(self, size: int, stream: int) -> int:
        """The address that CUDA gave to the segment which the recorded run took at this point."""
        for entry in self._growth:
            if entry.stream == stream and (entry.action == "segment_map" or entry.size == size):
                return entry.address
        address = self._beyond
        self._beyond += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    def _differ(self, entry: TraceEntry, recorded: str, simulated: str) -> None:
        if self.first_difference is None:
            self.first_difference = Divergence(entry.position, recorded, simulated)


def _told(growth: Sequence[tuple[str, int]]) -> str:
    told = [_("{action} {size} bytes", action=action, size=size) for action, size in growth]
    return ", ".join(told) or _("no new segment")


def _counts(recorded: tuple[Segment, ...], simulated: tuple[Segment, ...]) -> tuple[SegmentCount, ...]:
    ours, theirs = Counter(map(_kind, simulated)), Counter(map(_kind, recorded))
    return tuple(SegmentCount(*kind, theirs[kind], ours[kind]) for kind in sorted({*ours, *theirs}))


def _kind(segment: Segment) -> tuple[SegmentType, int, int]:
    return segment.segment_type, segment.stream, segment.total_size
