"""PyTorch's native CUDA caching allocator, without a device: c10/cuda/CUDACachingAllocator.cpp, rule by rule.

The rules are those of torch 2.6 to 2.15, read in its sources; the function that a rule comes from is named at
each. The libraries of 2.6.0, 2.13.0 and 2.15.0, run against a stand-in for the CUDA runtime, answered hundreds of
thousands of random requests exactly alike, addresses included (tests/unit/test_allocator_reference.py keeps some).

Not modelled, because a sequence of allocations and frees does not say when they happen: blocks held back by
``record_stream``, and private pools (CUDA graphs, ``torch.cuda.MemPool``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from vram_guard.allocator._driver import Placement, SimulatedDriver
from vram_guard.allocator._expandable import ExpandableSegments, least_expanded
from vram_guard.allocator._settings import LEAST_OWN_SEGMENT, AllocatorSettings
from vram_guard.allocator.blocks import (
    FREE,
    KEY_SHIFT,
    LARGE_ROUNDING,
    LEAST_BLOCK,
    LIVE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    UNMAPPED,
    Pool,
    PoolBlock,
    Segment,
    SegmentBlock,
    SegmentEvent,
    contiguous,
    view,
)
from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import _


class SimulatedOutOfMemory(VramGuardError, MemoryError):  # noqa: N818 - named after torch.OutOfMemoryError
    """The request could not be served within the capacity, where torch raises ``torch.OutOfMemoryError``.

    Attributes:
        requested: bytes asked for.
        segment: bytes that the device was asked for ("Tried to allocate" in torch's message).
        allocated: bytes in live blocks.
        reserved: bytes in segments, after everything that could be given back was given back.
        capacity: bytes that may be reserved.
    """

    def __init__(self, requested: int, segment: int, allocated: int, reserved: int, capacity: int) -> None:
        super().__init__(
            _(
                "{requested} bytes do not fit: the device was asked for {segment} bytes; of the {capacity} that may be "
                "reserved, {allocated} are allocated and {fragments} reserved but in pieces. Use a smaller batch or a "
                "larger budget",
                requested=requested,
                segment=segment,
                capacity=capacity,
                allocated=allocated,
                fragments=reserved - allocated,
            )
        )
        self.requested = requested
        self.segment = segment
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity


class CachingAllocator:
    """One device's caching allocator.

    Args:
        settings: as PYTORCH_CUDA_ALLOC_CONF would set them; None: PyTorch's defaults.
        capacity: bytes that the device has for this allocator; None: no limit.
        place: ``(size, stream) -> address`` of the next segment, for following a recorded run; None: by ``placement``.
        placement: where CUDA puts new segments, see :data:`vram_guard.allocator._driver.Placement`.

    Attributes:
        allocated: bytes in live blocks (``torch.cuda.memory_allocated``).
        requested: bytes asked for by the live blocks, before rounding.
        peak_allocated: the most bytes that live blocks ever had.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        place: Callable[[int, int], int] | None = None,
        placement: Placement = "above",
    ) -> None:
        if capacity is not None and capacity < 0:
            raise InvalidInputError(
                _("capacity must be bytes, 0 or more, or None for no limit; not {capacity}", capacity=capacity)
            )
        self.settings = settings = settings or AllocatorSettings()
        self.allocated = self.requested = self.peak_allocated = 0
        # The segments of expandable address space are one for each pool and stream: their order decides no tie.
        self._device = SimulatedDriver(capacity, place, "above" if settings.expandable_segments else placement)
        #: The first block of every segment, by the segment's address.
        self._heads: dict[int, PoolBlock] = {}
        self._live: dict[int, PoolBlock] = {}
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._expandable = (
            ExpandableSegments(self._device, self._heads, settings.large_segment_size)
            if settings.expandable_segments
            else None
        )
        self._divides = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._limits_splits = settings.max_split_size is not None and self._expandable is None
        # setMemoryFraction: no fraction below 1, no allowed maximum. Garbage collection needs one.
        self._allowed: int | None = None
        if capacity is not None and settings.per_process_memory_fraction < 1.0:
            self._allowed = int(settings.per_process_memory_fraction * capacity)
        self._collects = self._allowed is not None and settings.garbage_collection_threshold > 0.0
        #: Searches of the large pools so far: the clock of garbage collection.
        self._searches = 0
        #: Whether the best fit is always taken as it is.
        self._plain = not (settings.expandable_segments or settings.max_split_size or self._collects)

    @property
    def reserved(self) -> int:
        """Bytes in segments (``torch.cuda.memory_reserved``)."""
        return self._device.reserved

    @property
    def peak_reserved(self) -> int:
        """The most bytes that were ever in segments."""
        return self._device.peak_reserved

    def restart_peaks(self) -> None:
        """Peaks from here on (``torch.cuda.reset_peak_memory_stats``)."""
        self.peak_allocated = self.allocated
        self._device.peak_reserved = self._device.reserved

    @property
    def segment_events(self) -> list[SegmentEvent]:
        """Every call made to the device, in order."""
        return self._device.events

    # What a user of the allocator does.

    def malloc(self, size: int, stream: int = 0) -> int:
        """Take ``size`` bytes (at least 1) on a stream; the answer is the block's address.

        Raises:
            InvalidInputError: for a size below 1 (torch answers requests for 0 bytes without the allocator).
            SimulatedOutOfMemory: where the capacity does not suffice. Cached segments were given back by
                then.
        """
        if size < 1:
            raise InvalidInputError(_("size must be at least 1 byte, not {size}", size=size))
        block = self.allocate(size, stream)
        self._live[block.address] = block
        return block.address

    def free(self, handle: int) -> None:
        """Give a block back to the cache.

        Raises:
            InvalidInputError: where the handle is not of a live block.
        """
        block = self._live.pop(handle, None)
        if block is None:
            raise InvalidInputError(
                _("{address} is not the address of a live block: was it freed before?", address=f"{handle:#x}")
            )
        self.release(block)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``: give back all wholly free segments or pages."""
        for pools in (self._large, self._small):
            for _stream, pool in sorted(pools.items()):
                for block in tuple(pool.blocks):
                    if self._expandable is not None:
                        self._expandable.shrink(block)
                    elif not block.is_split:
                        self._give_back(block)

    def kernels_run(self) -> None:
        """Note that the first kernels run, see :data:`vram_guard.allocator._driver.HELD_ABOVE`."""
        self._device.let_go()

    def segments(self) -> list[Segment]:
        """The segments and their blocks as ``torch.cuda.memory_snapshot()`` shows them, by address."""
        views = [
            view(blocks, is_expandable=self._expandable is not None) for blocks in contiguous(self._heads.values())
        ]
        return sorted(views, key=lambda segment: segment.address)

    # The same for callers that keep the blocks themselves. These two are the hot path of every prediction:
    # what Pool.add, Pool.remove, PoolBlock.cut and PoolBlock.absorb do is written out, which halves the time of a
    # replay.

    def allocate(self, requested: int, stream: int = 0) -> PoolBlock:
        """``malloc``: a live block for ``requested`` bytes (at least 1), best fit first.

        Raises:
            SimulatedOutOfMemory: where the capacity does not suffice.
        """
        size = self.round_size(requested) if self._divides else (requested + 511) & -512
        pools = self._small if size <= SMALL_REQUEST else self._large
        pool = pools.get(stream) or self._open_pool(pools, stream)

        keys = pool.keys
        at = bisect_left(keys, size << KEY_SHIFT)
        if not self._plain:
            at = self._choose(pool, at, size)
        if at < len(keys):
            block = pool.blocks[at]
            del keys[at]
            del pool.blocks[at]
        else:
            block = self._take_new(pool, size, requested)

        granted = block.size
        remainder = granted - size
        if remainder >= pool.least_remainder and not (self._limits_splits and self._is_oversize(size)):
            # The front is handed out; what remains stays free.
            rest = PoolBlock(block.address + size, remainder, pool)
            rest.previous = block
            rest.next = following = block.next
            if following is not None:
                following.previous = rest
            block.next = rest
            block.size = granted = size
            rest.born = self._searches
            key = remainder << KEY_SHIFT | rest.address
            at = bisect_left(keys, key)
            keys.insert(at, key)
            pool.blocks.insert(at, rest)
        block.state = LIVE
        block.requested = requested
        self.requested += requested
        self.allocated += granted
        if self.allocated > self.peak_allocated:  # noqa: PLR1730 - max() would cost a call on the hot path
            self.peak_allocated = self.allocated
        return block

    def release(self, block: PoolBlock) -> None:
        """``free``: a live block becomes free and merges with its free neighbours. It is void afterwards."""
        self.allocated -= block.size
        self.requested -= block.requested
        pool = block.pool
        keys = pool.keys
        after = block.next
        before = block.previous
        if before is not None and before.state == FREE:
            at = bisect_left(keys, before.size << KEY_SHIFT | before.address)
            del keys[at]
            del pool.blocks[at]
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        else:
            block.state = FREE
        if after is not None and after.state == FREE:
            at = bisect_left(keys, after.size << KEY_SHIFT | after.address)
            del keys[at]
            del pool.blocks[at]
            block.size += after.size
            block.next = following = after.next
            if following is not None:
                following.previous = block
        block.born = self._searches
        key = block.size << KEY_SHIFT | block.address
        at = bisect_left(keys, key)
        keys.insert(at, key)
        pool.blocks.insert(at, block)

    def restore(self, segments: Iterable[Segment]) -> dict[int, PoolBlock]:
        """Start from segments that exist already; the answer is their live blocks by address.

        An expandable segment's first mapped address is taken for its start: where its address space really
        begins cannot be read from a snapshot, and only whole pages lie between the two.

        Raises:
            InvalidInputError: where the allocator was used before.
        """
        if self._heads:
            raise InvalidInputError(_("segments can only be restored into a fresh allocator"))
        for segment in sorted(segments, key=lambda segment: segment.address):
            self._restore_segment(segment)
        self.peak_allocated = self.allocated
        self._device.events.clear()
        return dict(self._live)

    def give_back_segment(self, address: int) -> bool:
        """Give back the one segment that begins at ``address``; False where none does that is wholly free."""
        block = self._heads.get(address)
        if block is None or block.is_split or block.state != FREE:
            return False
        self._give_back(block)
        return True

    # Sizes.

    def round_size(self, size: int) -> int:
        """``round_size``: what a request of ``size`` bytes (at least 1) becomes."""
        if size < LEAST_BLOCK:
            return LEAST_BLOCK
        divisions = self.settings.divisions_at(size)
        if divisions <= 1 or size <= LEAST_BLOCK * divisions:
            return -(-size // LEAST_BLOCK) * LEAST_BLOCK
        return _next_division(size, divisions)

    def segment_size(self, size: int) -> int:
        """``get_allocation_size``: what the device is asked for where no cached block will do."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if size < LEAST_OWN_SEGMENT:
            return self.settings.large_segment_size
        return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING

    def granted(self, requested: int, available: int) -> int:
        """``should_split``: the bytes that a request counts for in a block of ``available`` bytes."""
        size = self.round_size(requested)
        least = self._least_remainder(is_small=size <= SMALL_REQUEST)
        splits = available - size >= least and not (self._limits_splits and self._is_oversize(size))
        return size if splits else available

    def _least_remainder(self, *, is_small: bool) -> int:
        """Small pools and expandable segments keep every remainder, large ones what exceeds 1 MiB."""
        return LEAST_BLOCK if is_small or self._expandable is not None else SMALL_REQUEST + 1

    def _is_oversize(self, size: int) -> bool:
        limit = self.settings.max_split_size
        return limit is not None and size >= limit

    # Choosing a cached block.

    def _open_pool(self, pools: dict[int, Pool], stream: int) -> Pool:
        is_small = pools is self._small
        pools[stream] = pool = Pool(is_small, stream, self._least_remainder(is_small=is_small))
        return pool

    def _choose(self, pool: Pool, at: int, size: int) -> int:
        """``get_free_block``: the index of the block to use, given the best fit's; past the end: none."""
        if not pool.is_small:
            self._searches += 1
        none = len(pool.blocks)
        if at == none:
            return none
        if self._expandable is not None:
            at = least_expanded(pool.blocks, at)
        limit = self.settings.max_split_size
        if limit is None:
            return at
        found = pool.blocks[at].size
        if size < limit:
            return none if found >= limit else at  # oversize blocks are kept for oversize requests
        slack = self.settings.max_non_split_rounding_size or self.settings.large_segment_size
        return none if found >= size + slack else at

    # New memory, and giving memory back.

    def _take_new(self, pool: Pool, size: int, requested: int) -> PoolBlock:
        """The rest of ``malloc``: collect, ask the device, give cached segments back and ask again."""
        segment = self.segment_size(size)
        if self._collects:
            self._collect_garbage()
        block = self._grow(pool, size, segment)
        if block is None and self._give_back_oversize(pool, size):
            block = self._grow(pool, size, segment)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, size, segment)
        if block is None:
            capacity = self._device.capacity if self._allowed is None else self._allowed
            raise SimulatedOutOfMemory(requested, segment, self.allocated, self.reserved, capacity or 0)
        return block

    def _grow(self, pool: Pool, size: int, segment: int) -> PoolBlock | None:
        """``alloc_block``: a block that is in no list; None where the capacity does not suffice."""
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self._expandable is not None:
            return self._expandable.grow(pool, size)
        if not self._device.has(segment):
            return None
        address = self._device.place(segment, pool.stream)
        self._device.take("segment_alloc", address, segment, pool.stream)
        self._heads[address] = block = PoolBlock(address, segment, pool)
        return block

    def _give_back(self, block: PoolBlock) -> None:
        """``release_block``: cudaFree of a segment that is one free block."""
        block.pool.remove(block)
        block.state = UNMAPPED
        del self._heads[block.address]
        self._device.give("segment_free", block.address, block.size, block.pool.stream)

    def _give_back_oversize(self, pool: Pool, size: int) -> bool:
        """``release_available_cached_blocks``: give oversize segments back, only enough for this request.

        The best fit alone if there is one, else from the largest down until they reach the request's size.
        """
        limit = self.settings.max_split_size
        if limit is None or self._expandable is not None:
            return False
        target = max(size, limit)
        at = bisect_left(pool.keys, target << KEY_SHIFT)
        if at < len(pool.blocks):
            self._give_back(pool.blocks[at])
            return True
        given = 0
        while given < target and pool.blocks and pool.blocks[-1].size >= limit:
            given += pool.blocks[-1].size
            self._give_back(pool.blocks[-1])
        return given >= target

    def _collect_garbage(self) -> None:
        """``garbage_collect_cached_blocks``: free large segments that went unused for longest.

        Those at least as old as the average go, in rounds, until what exceeds the threshold is reclaimed.
        """
        threshold = int(self.settings.garbage_collection_threshold * (self._allowed or 0))
        excess = self.reserved - threshold
        whole = [block for _, pool in sorted(self._large.items()) for block in pool.blocks if not block.is_split]
        reclaimed = 0
        while reclaimed < excess and whole:
            average = sum(self._searches - block.born for block in whole) / len(whole)
            for block in whole:
                if self._searches - block.born >= average:
                    reclaimed += block.size
                    self._give_back(block)
            whole = [block for block in whole if block.state == FREE]

    # Starting from a given state.

    def _restore_segment(self, segment: Segment) -> None:
        pools = self._large if segment.is_large else self._small
        pool = pools.get(segment.stream) or self._open_pool(pools, segment.stream)
        if self._expandable is not None:
            block = self._expandable.restore(segment, pool)
        else:
            self._heads[segment.address] = block = PoolBlock(segment.address, segment.total_size, pool)
        self._device.take("segment_alloc", segment.address, segment.total_size, segment.stream)
        self._device.occupy(segment.address, segment.end)
        for shown in segment.blocks[:-1]:
            rest = block.cut(block.size - shown.size, LIVE)
            self._restore_block(block, shown)
            block = rest
        self._restore_block(block, segment.blocks[-1])

    def _restore_block(self, block: PoolBlock, shown: SegmentBlock) -> None:
        if shown.state == "inactive":
            block.state = FREE
            block.pool.add(block)
            return
        block.state = LIVE
        block.requested = shown.requested_size
        self.requested += shown.requested_size
        self.allocated += block.size
        self._live[block.address] = block


def _next_division(size: int, divisions: int) -> int:
    """``roundup_power2_next_division``: up to the next of ``divisions`` equal parts of its power of two.

    A part has 256 bytes at least: ``round_size`` asks for sizes above ``LEAST_BLOCK * divisions`` only.
    """
    part = 1 << (size.bit_length() - divisions.bit_length())
    return -(-size // part) * part
