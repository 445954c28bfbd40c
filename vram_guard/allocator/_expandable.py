"""Expandable segments: address space for each pool and stream, memory mapped behind it in pages."""

from __future__ import annotations

from vram_guard.allocator._driver import SimulatedDriver
from vram_guard.allocator.blocks import FREE, LIVE, SMALL_SEGMENT, UNMAPPED, Pool, PoolBlock, Segment

#: Address space of one expandable segment, in bytes. torch reserves 9/8 of the device's memory; the device is
#: not known here, and no device reaches 64 TiB.
ADDRESS_SPACE = 2**46


class ExpandableSegments:
    """The expandable segments of one allocator.

    Args:
        device: where the memory comes from.
        heads: the first block of every segment, by address; segments are entered and removed here.
        large_page: bytes of a page of the large pool; the small pool's have 2 MiB.
    """

    def __init__(self, device: SimulatedDriver, heads: dict[int, PoolBlock], large_page: int) -> None:
        self._device = device
        self._heads = heads
        self._large_page = large_page

    def grow(self, pool: Pool, size: int) -> PoolBlock | None:
        """``try_allocate_expandable_block``: map pages at the lowest address that has room.

        Returns:
            A block of at least ``size`` bytes that no list holds; None where the memory does not suffice
            (what could be mapped until then stays, as free memory).
        """
        block = self._find_room(pool, size)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        # What follows a free block that is too small is unmapped: free neighbours would have merged.
        while block.size < size and block.next is not None:
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def shrink(self, block: PoolBlock) -> None:
        """``unmap_block``: give back the whole pages inside a free block; its ragged ends stay free."""
        pool = block.pool
        page = self._page(pool)
        start = _start(block)
        end = block.address + block.size
        first = start + -(-(block.address - start) // page) * page
        last = start + (end - start) // page * page
        if first >= last:
            return
        pool.remove(block)
        if last < end:
            pool.add(block.cut(end - last, FREE))
        if first > block.address:
            ragged, block = block, block.cut(last - first, UNMAPPED)
            pool.add(ragged)
        self._device.give("segment_unmap", first, last - first, pool.stream)
        self._become_unmapped(block)

    def restore(self, segment: Segment, pool: Pool) -> PoolBlock:
        """The block that covers a stretch which a snapshot shows as mapped; the caller sets its state."""
        room = next((each for each in pool.unmapped if each.address + each.size > segment.address), None)
        if room is None:
            room = self._reserve(pool, segment.address, segment.total_size)
        gap = segment.address - room.address
        if gap:
            block = room.cut(room.size - gap, LIVE)
        else:
            block = room
            pool.unmapped.remove(room)
        if block.size > segment.total_size:
            pool.add_unmapped(block.cut(block.size - segment.total_size, UNMAPPED))
        return block

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._large_page

    def _find_room(self, pool: Pool, size: int) -> PoolBlock:
        """``find_expandable_block``: the first of a row of free and unmapped blocks that has room."""
        for unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and before.state == FREE else unmapped
            if _room(first, size) >= size:
                return first
        return self._reserve(pool, None, size)

    def _reserve(self, pool: Pool, address: int | None, size: int) -> PoolBlock:
        """A new segment: address space for at least ``size`` bytes, nothing mapped."""
        page = self._page(pool)
        space = -(-max(ADDRESS_SPACE, size) // page) * page
        if address is None:
            address = self._device.place(space, pool.stream)
        self._device.occupy(address, address + space)
        self._heads[address] = block = PoolBlock(address, space, pool, UNMAPPED)
        pool.add_unmapped(block)
        return block

    def _map(self, block: PoolBlock, size: int) -> PoolBlock | None:
        """``map_block``: put memory behind a block's first ``size`` bytes, in whole pages.

        Returns:
            The free block that holds them, merged with its free neighbours; None where the memory does not
            suffice.
        """
        pool = block.pool
        page = self._page(pool)
        size = -(-size // page) * page
        if not self._device.has(size):
            return None
        self._device.take("segment_map", block.address, size, pool.stream)
        pool.unmapped.remove(block)
        if size < block.size:
            pool.add_unmapped(block.cut(block.size - size, UNMAPPED))
        block.state = FREE
        after, before = block.next, block.previous
        if after is not None and after.state == FREE:
            pool.remove(after)
            block.absorb(after)
        if before is not None and before.state == FREE:
            pool.remove(before)
            before.absorb(block)
            block = before
        pool.add(block)
        return block

    def _become_unmapped(self, block: PoolBlock) -> None:
        """Merge with the unmapped neighbours; a segment with no memory left is given up."""
        pool = block.pool
        block.state = UNMAPPED
        after, before = block.next, block.previous
        if after is not None and after.state == UNMAPPED:
            pool.unmapped.remove(after)
            block.absorb(after)
        if before is not None and before.state == UNMAPPED:
            pool.unmapped.remove(before)
            before.absorb(block)
            block = before
        if block.is_split:
            pool.add_unmapped(block)
        else:
            del self._heads[block.address]


def least_expanded(blocks: list[PoolBlock], at: int) -> int:
    """``get_free_block``: from the best fit on, the block that would stay smallest if it could grow.

    A block grows into what is unmapped behind it. The search ends where the next one is no smaller so.
    """
    while at + 1 < len(blocks) and _expanded(blocks[at + 1]) < _expanded(blocks[at]):
        at += 1
    return at


def _expanded(block: PoolBlock) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def _room(block: PoolBlock | None, size: int) -> int:
    """Bytes of the free and unmapped blocks in a row from this one on, as far as ``size`` needs."""
    room = 0
    while block is not None and block.state != LIVE and room < size:
        room += block.size
        block = block.next
    return room


def _start(block: PoolBlock) -> int:
    """The address at which the block's segment begins: its pages are counted from there."""
    while block.previous is not None:
        block = block.previous
    return block.address
