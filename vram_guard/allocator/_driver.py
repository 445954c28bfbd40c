"""SimulatedDriver: stands in for cudaMalloc, cudaFree and the driver's mapping of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from vram_guard.allocator.blocks import SegmentAction, SegmentEvent

#: The first segment's address: where CUDA on Linux puts its own, and within what a double holds exactly.
BASE_ADDRESS = 0x7F0000000000

#: cudaMalloc's addresses for segments are multiples of this many bytes.
ALIGNMENT = 2 * 2**20


#: CUDA's driver on native Linux takes address space in multiples of this many bytes, each below the earlier ones, and
#: fills what a segment leaves of it with later ones: read out of addresses (benchmarks/gpu/results/NOTES.md).
STRETCH = 32 * 2**20

#: Bytes of address space above the first segment: taken until kernels run, from then on used up from the top. Read out
#: of the addresses of an H100 and an H200; 256 or 512 MiB would come to the same peaks in all rows that were measured.
HELD_ABOVE = 12 * STRETCH

#: Where a new segment lies: "below" the earlier ones, in stretches that are filled upwards (native Linux), or "above"
#: all of them (Windows, and Linux under it).
Placement = Literal["below", "above"]
PLACEMENTS: Final[tuple[Placement, ...]] = ("below", "above")


class SimulatedDriver:
    """A device's memory, as far as one allocator may reserve it.

    Addresses decide nothing but ties: between free blocks of one size the lowest is taken.

    Args:
        capacity: bytes that can be reserved; None: no limit.
        place: ``(size, stream) -> address`` of the next segment; None: by ``placement``.
        placement: where new segments lie.

    Attributes:
        reserved: bytes that are reserved now.
        peak_reserved: the most that ever were.
        events: every call, in order.
    """

    def __init__(
        self,
        capacity: int | None,
        place: Callable[[int, int], int] | None = None,
        placement: Placement = "above",
    ) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.peak_reserved = 0
        self.events: list[SegmentEvent] = []
        self._lowest = self._highest = self._let_go = BASE_ADDRESS
        #: What segments have left of their stretches: (first address, address behind the last), oldest first.
        self._left: list[tuple[int, int]] = []
        self._place = place
        self._placement = placement

    def has(self, size: int) -> bool:
        """True if ``size`` more bytes can be reserved."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def place(self, size: int, stream: int) -> int:
        """The address of a new stretch of ``size`` bytes of address space."""
        if self._place is not None:
            return self._place(size, stream)
        size = _up_to(size, ALIGNMENT)
        if self._placement == "above":
            address = self._highest
            self._highest += size
            return address
        for index in reversed(range(len(self._left) if size < STRETCH else 0)):  # less than a stretch is left of each
            address, end = self._left[index]
            if end - address >= size:
                break
        else:
            index, whole = len(self._left), _up_to(size, STRETCH)
            if self._let_go - whole >= BASE_ADDRESS:
                end = self._let_go
                address = self._let_go = end - whole
            else:
                end = self._lowest
                address = self._lowest = end - whole
            self._left.append((address, end))
        if address + size < end:
            self._left[index] = address + size, end
        else:
            del self._left[index]
        return address

    def let_go(self) -> None:
        """Kernels run from here on: the address space above the first segment is free."""
        self._let_go = BASE_ADDRESS + HELD_ABOVE

    def occupy(self, address: int, end: int) -> None:
        """Note address space that is taken already: later segments lie above or below it."""
        self._highest = max(self._highest, end)
        self._lowest = min(self._lowest, address // STRETCH * STRETCH)

    def take(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Reserve ``size`` bytes at an address."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.events.append(SegmentEvent(action, address, size, stream))

    def give(self, action: SegmentAction, address: int, size: int, stream: int) -> None:
        """Give ``size`` bytes at an address back."""
        self.reserved -= size
        self.events.append(SegmentEvent(action, address, size, stream))


def _up_to(size: int, unit: int) -> int:
    return -(-size // unit) * unit
