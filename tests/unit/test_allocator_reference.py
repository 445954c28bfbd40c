"""The simulation beside the real thing: what the allocator of torch 2.13.0 answered to the same requests.

The numbers below were recorded by running PyTorch's own library (libc10_cuda.so of the CUDA 13 wheel of torch
2.13.0) against a stand-in for the CUDA runtime that grants memory up to a capacity and hands out ascending
addresses. Each digest covers, after every single request, the address of the block, the allocated, reserved and
requested bytes, both peaks, and at the end every segment with every block.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from vram_guard.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20

#: Sizes at the edges of the allocator's rules, in bytes.
EDGES = (
    1,
    511,
    512,
    513,
    MIB,
    MIB + 1,
    2 * MIB,
    10 * MIB - 1,
    10 * MIB,
    11 * MIB,
    19 * MIB,
    20 * MIB,
    41 * MIB,
)


def numbers(seed: int) -> Iterator[int]:
    """Knuth's MMIX generator: the same numbers in every Python and in every other language."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def requests(seed: int, count: int = 600) -> list[tuple[str, int, int, int]]:
    """("alloc", block, size, stream), ("free", block, 0, 0) and ("empty", 0, 0, 0)."""
    draw = numbers(seed)
    asked: list[tuple[str, int, int, int]] = []
    live: list[int] = []
    for number in range(count):
        kind = next(draw) % 100
        if kind == 0:
            asked.append(("empty", 0, 0, 0))
        elif kind < 54 or not live:
            size = EDGES[next(draw) % len(EDGES)] if next(draw) % 2 else 1 + next(draw) % (1 << 9 + next(draw) % 17)
            asked.append(("alloc", number, size, next(draw) % 3 // 2))
            live.append(number)
        else:
            asked.append(("free", live.pop(next(draw) % len(live)), 0, 0))
    return asked


def simulate(settings: AllocatorSettings, capacity: int | None, seed: int) -> tuple[list[str], CachingAllocator, int]:
    allocator = CachingAllocator(settings, capacity)
    handles: dict[int, int] = {}
    lines = []
    failures = 0
    for kind, block, size, stream in requests(seed):
        head = "-"
        if kind == "alloc":
            try:
                handles[block] = allocator.malloc(size, stream)
                head = str(handles[block])
            except SimulatedOutOfMemory:
                failures += 1
                head = "oom"
        elif kind == "empty":
            allocator.empty_cache()
        elif block in handles:
            allocator.free(handles.pop(block))
        lines.append(
            f"{head} {allocator.allocated} {allocator.reserved} {allocator.requested} "
            f"{allocator.peak_allocated} {allocator.peak_reserved}"
        )
    for segment in allocator.segments():
        blocks = " ".join(f"{b.size}:{b.requested_size}:{int(b.state != 'inactive')}" for b in segment.blocks)
        lines.append(
            f"{segment.address} {segment.total_size} {segment.stream} {int(segment.is_large)} "
            f"{int(segment.is_expandable)} {blocks}"
        )
    return lines, allocator, failures


# configuration, capacity (MiB, or none), seed -> peak allocated, peak reserved (bytes), out of memory, digest
RECORDED: list[tuple[str, int | None, int, int, int, int, str]] = [
    # RECORDED-BEGIN
    ("", None, 100, 413842432, 509607936, 0, "60b9c1acc8d6958d"),
    ("", 220, 101, 197046272, 230686720, 5, "8938a6d4789c0db7"),
    ("expandable_segments:True", None, 102, 514797568, 660602880, 0, "eaff04f4528737e5"),
    ("expandable_segments:True", 220, 103, 189097984, 224395264, 24, "c738357569fb624c"),
    ("max_split_size_mb:20", 220, 104, 201264640, 228589568, 4, "912b6ca2d9eb78f2"),
    (
        "max_split_size_mb:41,max_non_split_rounding_mb:30",
        None,
        105,
        466978816,
        513802240,
        0,
        "548c9b46cae414e5",
    ),
    (
        "max_split_size_mb:41,max_non_split_rounding_mb:30",
        260,
        106,
        264217600,
        272629760,
        13,
        "7ae90d19cb38a5f7",
    ),
    ("roundup_power2_divisions:4", None, 107, 285578240, 373293056, 0, "48cad17eff312e5c"),
    ("roundup_power2_divisions:[1:8,4:2,16:16,>:4]", 220, 108, 214985216, 230686720, 5, "86f478828039a482"),
    (
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        None,
        109,
        409000960,
        488636416,
        0,
        "7c6e555c2ec304c3",
    ),
    ("large_segment_size_mb:33", 220, 110, 206154240, 230686720, 13, "626a9272c5e20502"),
    (
        "large_segment_size_mb:33,expandable_segments:True",
        None,
        111,
        235606016,
        317718528,
        0,
        "57e78348b1192c6e",
    ),
    (
        "large_segment_size_mb:33,expandable_segments:True",
        220,
        112,
        184057856,
        218103808,
        36,
        "c34b73dce04ad0c5",
    ),
    ("max_split_size_mb:25,expandable_segments:True", 220, 113, 205485056, 222298112, 53, "bc1d8a9282a8f6df"),
    ("per_process_memory_fraction:0.8", 300, 114, 226953216, 249561088, 8, "77725c51ffe3faec"),
    (
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        420,
        115,
        361864192,
        396361728,
        4,
        "67e1ebb6798c2348",
    ),
    (
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.95,max_split_size_mb:64",
        330,
        116,
        248109568,
        293601280,
        0,
        "b7a321c46638c308",
    ),
    # RECORDED-END
]


@pytest.mark.parametrize(("conf", "capacity", "seed", "allocated", "reserved", "failures", "digest"), RECORDED)
def test_answers_every_request_as_torch_did(conf, capacity, seed, allocated, reserved, failures, digest):
    bytes_there = None if capacity is None else capacity * MIB
    lines, allocator, failed = simulate(AllocatorSettings.from_conf(conf), bytes_there, seed)
    assert (allocator.peak_allocated, allocator.peak_reserved, failed) == (allocated, reserved, failures)
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest
