"""Segments, blocks and sorted lists of free blocks: the allocator's books, and what may be inspected."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from vram_guard.allocator._settings import MIB

#: Every size is a multiple of this many bytes, and this is the least (``kMinBlockSize`` in
#: AllocatorConfig.h).
LEAST_BLOCK: Final = 512

#: Requests of up to this many bytes belong to the small pool (``kSmallSize``).
SMALL_REQUEST: Final = MIB

#: Bytes of a segment of the small pool, and of its pages where segments expand (``kSmallBuffer``).
SMALL_SEGMENT: Final = 2 * MIB

#: Large segments of their own are rounded up to this many bytes (``kRoundLarge``).
LARGE_ROUNDING: Final = 2 * MIB

FREE: Final = 0
LIVE: Final = 1
#: A stretch of address space of an expandable segment that no memory stands behind.
UNMAPPED: Final = 2

#: A free block's key is ``size << KEY_SHIFT | address``: one int compares faster than a tuple. Addresses stay
#: far below: they only grow by the bytes of the segments handed out.
KEY_SHIFT: Final = 128

SegmentType = Literal["small", "large"]
SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
BlockState = Literal["active_allocated", "inactive"]


class SegmentBlock(NamedTuple):
    """One block of a segment, named as in ``torch.cuda.memory_snapshot()``; sizes in bytes."""

    address: int
    size: int
    requested_size: int
    """Bytes that were asked for; 0 while the block is inactive."""
    state: BlockState


@dataclass(frozen=True)
class Segment:
    """Memory taken from the device in one piece; of an expandable segment, one contiguous mapped stretch."""

    address: int
    total_size: int
    """Bytes: the sum of the sizes of its blocks."""
    stream: int
    segment_type: SegmentType
    is_expandable: bool
    blocks: tuple[SegmentBlock, ...]

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + self.total_size

    @property
    def is_large(self) -> bool:
        """True if it belongs to the pool for requests of more than 1 MiB."""
        return self.segment_type == "large"

    @property
    def allocated_size(self) -> int:
        """Bytes of its blocks that are handed out."""
        return sum(block.size for block in self.blocks if block.state != "inactive")


class SegmentEvent(NamedTuple):
    """A call the allocator made to the device, named as in a snapshot's trace."""

    action: SegmentAction
    address: int
    size: int
    stream: int


class TraceEntry(NamedTuple):
    """One action of the allocator; sizes in bytes, for "alloc" and "free" as they were requested."""

    action: str
    address: int
    """0 for "oom"."""
    size: int
    stream: int
    position: int
    """Its index in the snapshot's ``device_traces[device]``."""


class PoolBlock:
    """A stretch of a segment: live, free, or (expandable segments) without memory behind it."""

    __slots__ = ("address", "born", "next", "pool", "previous", "requested", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: int = FREE) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.state = state
        self.requested = 0
        #: The large pools' search count when the block last became free (``gc_count_base``).
        self.born = 0
        self.previous: PoolBlock | None = None
        self.next: PoolBlock | None = None

    @property
    def is_split(self) -> bool:
        """True if it shares its segment with other blocks."""
        return self.previous is not None or self.next is not None

    def cut(self, size: int, state: int) -> PoolBlock:
        """A new neighbour of ``size`` bytes, taken from this block's end."""
        self.size -= size
        block = PoolBlock(self.address + self.size, size, self.pool, state)
        block.previous = self
        block.next = following = self.next
        if following is not None:
            following.previous = block
        self.next = block
        return block

    def absorb(self, following: PoolBlock) -> None:
        """Take over the bytes of the block behind this one, which is gone afterwards."""
        self.size += following.size
        self.next = after = following.next
        if after is not None:
            after.previous = self


class Pool:
    """The free blocks of one size class (small or large) on one stream, by size and then by address.

    torch keeps one set per size class, ordered by (stream, size, address), and never crosses from one stream
    to the next while it searches; one list per stream is the same order.
    """

    __slots__ = ("blocks", "is_small", "keys", "least_remainder", "stream", "unmapped")

    def __init__(self, is_small: bool, stream: int, least_remainder: int) -> None:
        self.is_small = is_small
        self.stream = stream
        #: A free block is split where at least this many bytes remain.
        self.least_remainder = least_remainder
        self.keys: list[int] = []
        self.blocks: list[PoolBlock] = []
        #: Unmapped blocks by address; few.
        self.unmapped: list[PoolBlock] = []

    def add(self, block: PoolBlock) -> None:
        """Put a free block in its place."""
        key = block.size << KEY_SHIFT | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: PoolBlock) -> None:
        """Take a block that is in the list out of it."""
        at = bisect_left(self.keys, block.size << KEY_SHIFT | block.address)
        del self.keys[at]
        del self.blocks[at]

    def add_unmapped(self, block: PoolBlock) -> None:
        """Put an unmapped block in its place."""
        addresses = [other.address for other in self.unmapped]
        self.unmapped.insert(bisect_left(addresses, block.address), block)


def contiguous(heads: Iterable[PoolBlock]) -> Iterator[tuple[PoolBlock, ...]]:
    """The blocks of every segment; of an expandable one, of each stretch that has memory behind it."""
    for head in heads:
        stretch: list[PoolBlock] = []
        block: PoolBlock | None = head
        while block is not None:
            if block.state != UNMAPPED:
                stretch.append(block)
            if stretch and (block.state == UNMAPPED or block.next is None):
                yield tuple(stretch)
                stretch = []
            block = block.next


def view(blocks: Sequence[PoolBlock], *, is_expandable: bool) -> Segment:
    """The neighbouring blocks of one segment as a snapshot shows them."""
    pool = blocks[0].pool
    return Segment(
        address=blocks[0].address,
        total_size=sum(block.size for block in blocks),
        stream=pool.stream,
        segment_type="small" if pool.is_small else "large",
        is_expandable=is_expandable,
        blocks=tuple(
            SegmentBlock(block.address, block.size, block.requested, "active_allocated")
            if block.state == LIVE
            else SegmentBlock(block.address, block.size, 0, "inactive")
            for block in blocks
        ),
    )
