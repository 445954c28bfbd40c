"""A device whose memory is what a test says."""

from __future__ import annotations

GIB = 2**30


class Numbers:
    """A device's memory, in numbers that the test gives."""

    def __init__(self) -> None:
        self.now = [0, 0]
        self.peaks = [0, 0]
        self.released = 0
        self.kept: int | None = None
        """Bytes that a release leaves reserved; None: it finds nothing to give back."""
        self.total = 80 * GIB
        self.others = 0

    def unused(self) -> int:
        return self.total - self.others - self.now[1]

    def take(self, allocated: int, reserved: int) -> None:
        self.now = [allocated, reserved]
        self.peaks = [max(pair) for pair in zip(self.peaks, self.now, strict=True)]

    def name(self) -> str:
        return "NVIDIA GeForce RTX 4090"

    def allocated(self) -> int:
        return self.now[0]

    def reserved(self) -> int:
        return self.now[1]

    def peak_allocated(self) -> int:
        return self.peaks[0]

    def peak_reserved(self) -> int:
        return self.peaks[1]

    def release(self) -> None:
        self.released += 1
        if self.kept is not None:
            self.now[1] = self.kept
