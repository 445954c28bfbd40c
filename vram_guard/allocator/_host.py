"""Host memory that a training step takes: ordinary tensors, and those in page-locked ("pinned") memory."""

from __future__ import annotations

from collections.abc import Sequence


def pinned_size(size: int) -> int:
    """Bytes that CUDA's allocator of pinned memory takes for a request: the next power of two.

    ``ATen/core/CachingHostAllocator.h``, ``allocate``: "Round up the allocation to the nearest power of two to improve
    reuse", in torch 2.4 and, by default, in every later release (``pinned_max_round_threshold``).
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def host_peak(events: Sequence[int], sizes: Sequence[int], pinned: Sequence[bool]) -> int:
    """The most host memory in use at any time, in bytes.

    Ordinary memory goes back to the system when it is freed. Pinned memory never does: a freed block waits for the next
    request of its size (``CachingHostAllocator.h``, ``get_free_block``), which is counted as if the GPU had finished
    with the block by then.

    Args:
        events: ``i >= 0``: block ``i`` is allocated; ``~i``: it is freed.
        sizes: requested bytes of every block.
        pinned: which blocks are in pinned memory.
    """
    ordinary = kept = peak = 0
    waiting: dict[int, int] = {}
    for event in events:
        block = event if event >= 0 else ~event
        size = pinned_size(sizes[block]) if pinned[block] else sizes[block]
        if not pinned[block]:
            ordinary += size if event >= 0 else -size
        elif event < 0:
            waiting[size] = waiting.get(size, 0) + 1
        elif waiting.get(size):
            waiting[size] -= 1
        else:
            kept += size
        peak = max(peak, ordinary + kept)
    return peak
