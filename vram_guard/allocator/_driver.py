"""SimulatedDriver: stands in for cudaMalloc, cudaFree and the driver's mapping of pages."""

from __future__ import annotations

from collections.abc import Callable

from vram_guard.allocator.blocks import SegmentAction, SegmentEvent

#: The first segment's address: where CUDA on Linux puts its own, and within what a double holds exactly.
BASE_ADDRESS = 0x7F0000000000

#: cudaMalloc's addresses for segments are multiples of this many bytes.
ALIGNMENT = 2 * 2**20


class SimulatedDriver:
    """A device's memory, as far as one allocator may reserve it.

    Where ``cudaMalloc`` would put a segment cannot be known without the device. Here every new segment lies
    above all earlier ones. Addresses decide nothing but ties: between free blocks of one size the lowest is
    taken.

    Args:
        capacity: bytes that can be reserved; None: no limit.
        place: ``(size, stream) -> address`` of the next segment; None: above all earlier ones.

    Attributes:
        reserved: bytes that are reserved now.
        peak_reserved: the most that ever were.
        events: every call, in order.
    """

    def __init__(self, capacity: int | None, place: Callable[[int, int], int] | None = None) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.peak_reserved = 0
        self.events: list[SegmentEvent] = []
        self.next_address = BASE_ADDRESS
        self._place = place

    def has(self, size: int) -> bool:
        """True if ``size`` more bytes can be reserved."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def place(self, size: int, stream: int) -> int:
        """The address of a new stretch of ``size`` bytes of address space."""
        if self._place is not None:
            return self._place(size, stream)
        address = self.next_address
        self.next_address += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    def take(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Reserve ``size`` bytes at an address."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.events.append(SegmentEvent(action, address, size, stream))

    def give(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Give ``size`` bytes at an address back."""
        self.reserved -= size
        self.events.append(SegmentEvent(action, address, size, stream))
