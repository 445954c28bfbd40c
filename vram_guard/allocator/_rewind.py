"""The segments that stood when a recording began: those at its end, with every recorded action undone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vram_guard.allocator._caching import CachingAllocator
from vram_guard.allocator._settings import AllocatorSettings
from vram_guard.allocator.blocks import SMALL_REQUEST, SMALL_SEGMENT, Segment, SegmentBlock, SegmentType, TraceEntry
from vram_guard.errors import InvalidInputError
from vram_guard.language import _


class Rewound(NamedTuple):
    """The state before a trace."""

    segments: tuple[Segment, ...]
    live: tuple[TraceEntry, ...]
    """The blocks that were alive, as if each had just been allocated, by address."""


class _Live(NamedTuple):
    requested: int
    granted: int | None
    """Bytes of the block; None where the snapshot does not contain it: it was freed during the recording."""
    stream: int
    freed_at: int
    """Position of the trace entry that frees it; -1: none does."""


def rewind(final: Iterable[Segment], trace: Sequence[TraceEntry], freed: str, settings: AllocatorSettings) -> Rewound:
    """Undo a trace, from its last action to its first.

    A block that was freed during the recording left only its requested size. Where another was handed out behind it,
    it reached up to that one. Otherwise it is given the size that the rounding makes of it, and the gap behind it as
    well where the allocator would not have split that off.

    Args:
        final: the segments after the trace.
        trace: what happened.
        freed: the action that makes memory free again.
        settings: for the sizes of blocks.

    Raises:
        InvalidInputError: where the trace and the segments contradict each other.
    """
    layout = _Layout(final, settings)
    for entry in reversed(trace):
        if entry.action == "alloc":
            layout.undo_alloc(entry)
        elif entry.action == freed:
            layout.undo_free(entry)
        elif entry.action in ("segment_alloc", "segment_map"):
            layout.undo_growth(entry)
        elif entry.action in ("segment_free", "segment_unmap"):
            layout.undo_release(entry)
    live = sorted(layout.live.items())
    return Rewound(
        tuple(layout.segments()),
        tuple(TraceEntry("alloc", address, block.requested, block.stream, -1) for address, block in live),
    )


class _Layout:
    """Segments and live blocks at one moment of the recording."""

    def __init__(self, final: Iterable[Segment], settings: AllocatorSettings) -> None:
        self.rules = CachingAllocator(settings)
        #: Segments without their blocks; of an expandable one, contiguous mapped stretches.
        self.stretches: list[Segment] = []
        self.live: dict[int, _Live] = {}
        for segment in final:
            self.stretches.append(replace(segment, blocks=()))
            for block in segment.blocks:
                if block.state != "inactive":
                    self.live[block.address] = _Live(block.requested_size, block.size, segment.stream, -1)
        #: Of the live blocks, in order.
        self.addresses = sorted(self.live)

    def undo_alloc(self, entry: TraceEntry) -> None:
        block = self.live.pop(entry.address, None)
        if block is None or block.requested != entry.size:
            raise _contradiction(entry, _("allocates {size} bytes, which are not in use afterwards", size=entry.size))
        at = bisect_left(self.addresses, entry.address)
        del self.addresses[at]
        if at:
            self._reaches(self.addresses[at - 1], entry.address)

    def undo_free(self, entry: TraceEntry) -> None:
        if entry.address in self.live:
            raise _contradiction(entry, _("frees what is in use afterwards"))
        self.live[entry.address] = _Live(entry.size, None, entry.stream, entry.position)
        insort(self.addresses, entry.address)

    def _reaches(self, before: int, address: int) -> None:
        """A block is handed out from where free memory begins: the live one before it reached up to there."""
        block = self.live[before]
        size = address - before
        slack = size - self.rules.round_size(block.requested)
        # A remainder of no more than that is left on a large block.
        is_slack = block.granted is None and 0 < slack <= SMALL_REQUEST
        if is_slack and self._stretch_at(before) is self._stretch_at(address):
            self.live[before] = block._replace(granted=size)

    def _stretch_at(self, address: int) -> Segment | None:
        return next((each for each in self.stretches if each.address <= address < each.end), None)

    def undo_growth(self, entry: TraceEntry) -> None:
        """Take away what was added: a whole segment, or pages of an expandable one."""
        stretch = self._stretch_at(entry.address)
        end = entry.address + entry.size
        pages = entry.action == "segment_map"
        if stretch is None or end > stretch.end or (not pages and stretch.total_size != entry.size):
            raise _contradiction(entry, _("adds memory that no segment shows afterwards"))
        self.stretches.remove(stretch)
        for address, size in ((stretch.address, entry.address - stretch.address), (end, stretch.end - end)):
            if size:
                self.stretches.append(replace(stretch, address=address, total_size=size, is_expandable=True))

    def undo_release(self, entry: TraceEntry) -> None:
        """Put back what was given up; pages join their neighbours."""
        end = entry.address + entry.size
        if any(entry.address < each.end and each.address < end for each in self.stretches):
            raise _contradiction(entry, _("gives up memory that is there afterwards"))
        is_expandable = entry.action == "segment_unmap"
        restored = Segment(entry.address, entry.size, entry.stream, self._kind(entry), is_expandable, ())
        if restored.is_expandable:
            for each in list(self.stretches):
                if (
                    each.is_expandable
                    and each.stream == entry.stream
                    and entry.address in (each.end, each.address - entry.size)
                ):
                    self.stretches.remove(each)
                    address, size = min(restored.address, each.address), restored.total_size + each.total_size
                    restored = replace(each, address=address, total_size=size)
        self.stretches.append(restored)

    def _kind(self, entry: TraceEntry) -> SegmentType:
        """Small segments have 2 MiB, large ones 10 or more; pages of an expandable one come in multiples."""
        if entry.action == "segment_free":
            return "small" if entry.size == SMALL_SEGMENT else "large"
        return "large" if entry.size % self.rules.settings.large_segment_size == 0 else "small"

    def segments(self) -> Iterator[Segment]:
        """The segments with their blocks, by address."""
        addresses = self.addresses
        at = 0
        for stretch in sorted(self.stretches, key=lambda each: each.address):
            inside = []
            while at < len(addresses) and addresses[at] < stretch.end:
                inside.append(addresses[at])
                at += 1
            if inside and inside[0] < stretch.address:
                raise _outside(self.live[inside[0]])
            yield replace(stretch, blocks=tuple(self._blocks(stretch, inside)))
        if at < len(addresses):
            raise _outside(self.live[addresses[at]])

    def _blocks(self, stretch: Segment, inside: list[int]) -> Iterator[SegmentBlock]:
        """The live blocks of a stretch and the free ones between them."""
        at = stretch.address
        for address, following in zip(inside, [*inside, stretch.end][1:], strict=True):
            if at < address:
                yield SegmentBlock(at, address - at, 0, "inactive")
            block = self.live[address]
            room = following - address
            size = block.granted or self._granted(block.requested, room)
            if size > room:
                raise _outside(block)
            yield SegmentBlock(address, size, block.requested, "active_allocated")
            at = address + size
        if at < stretch.end:
            yield SegmentBlock(at, stretch.end - at, 0, "inactive")

    def _granted(self, requested: int, room: int) -> int:
        if self.rules.round_size(requested) > room:
            return room + 1
        return self.rules.granted(requested, room)


def _contradiction(entry: TraceEntry, problem: str) -> InvalidInputError:
    return InvalidInputError(
        _(
            "the snapshot contradicts itself: trace entry {position} ({action} at {address}) {problem}. Record and "
            "save the snapshot again, of one process and its device",
            position=entry.position,
            action=entry.action,
            address=f"{entry.address:#x}",
            problem=problem,
        )
    )


def _outside(block: _Live) -> InvalidInputError:
    position = block.freed_at
    where = _("freed by trace entry {position}", position=position) if position >= 0 else _("alive at the end")
    return InvalidInputError(_("the snapshot contradicts itself: a block {where} lies in no segment", where=where))
