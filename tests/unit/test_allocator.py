"""Hand-worked cases. Sizes in bytes; the arithmetic stands beside each."""

from __future__ import annotations

import subprocess
import sys

import pytest
from each import each

from vram_guard.allocator import (
    AllocatorSettings,
    CachingAllocator,
    ReplayFailure,
    SimulatedOutOfMemory,
    replay,
)
from vram_guard.errors import InvalidInputError, VramGuardError

KIB = 2**10
MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def shape(allocator):
    """Per segment its size and the sizes of its blocks, live ones in brackets."""
    return [
        (s.total_size, [[b.size] if b.state == "active_allocated" else b.size for b in s.blocks])
        for s in allocator.segments()
    ]


# Rounding (round_size)


@each(
    ("size", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512), (3000000, 3000320)],
)
def test_sizes_become_multiples_of_512(size, rounded):
    assert CachingAllocator().round_size(size) == rounded


@each(
    ("divisions", "size", "rounded"),
    [
        # 5 KiB lies between 4 and 8 KiB; four parts of 1 KiB each: 5 KiB is a bound already.
        (4, 5 * KIB, 5 * KIB),
        (4, 5 * KIB + 1, 6 * KIB),
        (4, 7 * KIB + 1, 8 * KIB),
        # Not above 512 * 4 = 2 KiB: rounded to 512 as ever.
        (4, 2 * KIB, 2 * KIB),
        (4, 1025, 1536),
        # Powers of two stay.
        (8, 64 * MIB, 64 * MIB),
        # Between 64 and 128 MiB, eight parts of 8 MiB.
        (8, 65 * MIB, 72 * MIB),
        # One division is none.
        (1, 5 * KIB + 1, 5 * KIB + 512),
    ],
)
def test_divisions_of_powers_of_two(divisions, size, rounded):
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    assert CachingAllocator(settings).round_size(size) == rounded


# Segments (get_allocation_size)


@each(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (24 * MIB, 24 * MIB),
    ],
)
def test_the_first_request_decides_the_segment(size, segment):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert shape(allocator) == [(2 * MIB, [[512 * KIB]] * 4)]
    allocator.malloc(1)
    # Full: 4 x 512 KiB = 2 MiB, so a second segment begins.
    assert shape(allocator)[1] == (2 * MIB, [[512], 2 * MIB - 512])


def test_a_large_remainder_of_1_mib_is_not_split_off():
    allocator = CachingAllocator()
    allocator.malloc(11 * MIB)
    # A segment of 12 MiB; the remainder of 1 MiB is not more than 1 MiB: the block keeps it, and it counts.
    assert shape(allocator) == [(12 * MIB, [[12 * MIB]])]
    assert (allocator.allocated, allocator.requested) == (12 * MIB, 11 * MIB)
    other = CachingAllocator()
    other.malloc(11 * MIB - 512)
    # 12 MiB - (11 MiB - 512) = 1 MiB + 512: split off.
    assert shape(other) == [(12 * MIB, [[11 * MIB - 512], MIB + 512])]


def test_a_small_remainder_of_512_is_split_off():
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert shape(allocator) == [(2 * MIB, [[MIB], [MIB - 512], 512])]


# Choosing (get_free_block)


def test_best_fit_takes_the_smallest_that_holds():
    allocator = CachingAllocator()
    big, middle = allocator.malloc(30 * MIB), allocator.malloc(24 * MIB)
    allocator.free(big)
    allocator.free(middle)
    # 22 MiB: 24 fits better than 30, and leaves 2 MiB.
    assert allocator.malloc(22 * MIB) == middle
    assert allocator.reserved == 54 * MIB


def test_a_block_is_not_reused_on_another_stream():
    allocator = CachingAllocator()
    first = allocator.malloc(10 * MIB, stream=0)
    allocator.free(first)
    allocator.malloc(10 * MIB, stream=7)
    assert allocator.reserved == 20 * MIB
    assert allocator.malloc(10 * MIB, stream=0) == first
    assert [segment.stream for segment in allocator.segments()] == [0, 7]


def test_small_and_large_requests_never_share():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(512)
    assert [(s.segment_type, s.total_size) for s in allocator.segments()] == [("large", 20 * MIB), ("small", 2 * MIB)]


def test_free_neighbours_merge_on_both_sides():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(4)]
    # 20 MiB: four of 4, and 4 that remain.
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert shape(allocator) == [(20 * MIB, [4 * MIB, [4 * MIB], 4 * MIB, [4 * MIB], 4 * MIB])]
    allocator.free(blocks[1])
    assert shape(allocator) == [(20 * MIB, [12 * MIB, [4 * MIB], 4 * MIB])]
    allocator.free(blocks[3])
    assert shape(allocator) == [(20 * MIB, [20 * MIB])]


# max_split_size


def test_oversize_blocks_are_neither_split_nor_lent():
    allocator = CachingAllocator(AllocatorSettings(max_split_size=40 * MIB))
    allocator.free(allocator.malloc(60 * MIB))
    # 30 MiB is below the limit of 40: the cached 60 are not for it.
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 90 * MIB
    # 45 MiB is oversize itself: 60 < 45 + 20, taken whole.
    allocator.malloc(45 * MIB)
    assert (allocator.reserved, allocator.allocated) == (90 * MIB, 90 * MIB)


def test_the_slack_for_oversize_blocks_is_a_large_segment():
    allocator = CachingAllocator(AllocatorSettings(max_split_size=40 * MIB))
    allocator.free(allocator.malloc(60 * MIB))
    # 60 >= 40 + 20: too large to hand out for 40.
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 100 * MIB
    wider = AllocatorSettings(max_split_size=40 * MIB, max_non_split_rounding_size=21 * MIB)
    allocator = CachingAllocator(wider)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 60 * MIB


def test_only_as_many_oversize_blocks_are_given_back_as_needed():
    allocator = CachingAllocator(AllocatorSettings(max_split_size=20 * MIB), capacity=150 * MIB)
    for handle in [allocator.malloc(size * MIB) for size in (20, 50, 70)]:
        allocator.free(handle)
    # 140 of 150 reserved. 30 MiB: 50 fits but is not less than 30 + 20. Giving back the best fit, 50, is enough.
    allocator.malloc(30 * MIB)
    assert sorted(s.total_size // MIB for s in allocator.segments()) == [20, 30, 70]


def test_several_oversize_blocks_are_given_back_from_the_largest_down():
    allocator = CachingAllocator(AllocatorSettings(max_split_size=20 * MIB), capacity=150 * MIB)
    for handle in [allocator.malloc(size * MIB) for size in (20, 50, 70)]:
        allocator.free(handle)
    # 100 MiB: no block is that large; 70 + 50 reach it, 20 stays.
    allocator.malloc(100 * MIB)
    assert sorted(s.total_size // MIB for s in allocator.segments()) == [20, 100]


# Running out


def test_cached_segments_are_given_back_before_giving_up():
    allocator = CachingAllocator(capacity=30 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(24 * MIB)
    # 20 cached + 24 > 30: the cached segment goes, the second try succeeds.
    assert allocator.reserved == 24 * MIB
    assert [event.action for event in allocator.segment_events] == ["segment_alloc", "segment_free", "segment_alloc"]


def test_out_of_memory_tells_what_was_there():
    allocator = CachingAllocator(capacity=30 * MIB)
    allocator.malloc(2 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match="smaller batch") as caught:
        allocator.malloc(19 * MIB)
    # 2 MiB hold a segment of 20, of which 18 are free. 19 need another segment, of 20: 40 > 30.
    error = caught.value
    assert (error.requested, error.segment) == (19 * MIB, 20 * MIB)
    assert (error.allocated, error.reserved, error.capacity) == (2 * MIB, 20 * MIB, 30 * MIB)
    # It can go on: 18 MiB are there.
    allocator.malloc(18 * MIB)
    assert allocator.allocated == 20 * MIB


def test_exactly_the_capacity_fits():
    allocator = CachingAllocator(capacity=24 * MIB)
    allocator.malloc(24 * MIB)
    assert allocator.reserved == 24 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        CachingAllocator(capacity=24 * MIB - 1).malloc(24 * MIB)


def test_a_request_of_an_exabyte_is_counted_where_nothing_limits_it():
    allocator = CachingAllocator()
    allocator.malloc(2**60)
    assert allocator.reserved == 2**60
    with pytest.raises(SimulatedOutOfMemory):
        CachingAllocator(capacity=80 * 2**30).malloc(2**60)


def test_the_memory_fraction_limits():
    allocator = CachingAllocator(AllocatorSettings(per_process_memory_fraction=0.5), capacity=80 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(1)
    assert caught.value.capacity == 40 * MIB


# Garbage collection


def test_the_oldest_segments_are_collected_above_the_threshold():
    settings = AllocatorSettings(garbage_collection_threshold=0.5, per_process_memory_fraction=0.9)
    allocator = CachingAllocator(settings, capacity=200 * MIB)
    old, recent = allocator.malloc(50 * MIB), allocator.malloc(40 * MIB)
    allocator.free(old)  # born at search 2
    for _ in range(3):  # searches 3, 4, 5; each takes and gives back the 40 MiB
        allocator.free(recent)
        recent = allocator.malloc(40 * MIB)
    allocator.free(recent)  # born at search 5
    # Threshold: 0.5 * 180 = 90 MiB, reserved 90: nothing to collect yet at this request (search 6).
    held = allocator.malloc(60 * MIB)
    assert allocator.reserved == 150 * MIB
    # Search 7: 60 MiB too many. Ages 7-2 = 5 and 7-5 = 2, average 3.5: the 50 MiB go. 50 < 60, so once more: of
    # the one that is left the age is the average. It goes, too.
    allocator.malloc(70 * MIB)
    assert allocator.reserved == 130 * MIB
    allocator.free(held)


# Expandable segments


def test_expandable_segments_grow_by_pages_of_20_mib():
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(30 * MIB)
    # Two pages of 20 MiB; 10 MiB remain, and all of it is split off.
    assert shape(allocator) == [(40 * MIB, [[30 * MIB], 10 * MIB])]
    allocator.malloc(15 * MIB)
    # 10 are there, 5 are missing: one page more; 40 + 20 - 45 = 15 remain.
    assert shape(allocator) == [(60 * MIB, [[30 * MIB], [15 * MIB], 15 * MIB])]


def test_small_expandable_segments_grow_by_pages_of_2_mib():
    allocator = CachingAllocator(EXPANDABLE)
    for _ in range(5):
        allocator.malloc(MIB)
    # 5 MiB in pages of 2.
    assert shape(allocator) == [(6 * MIB, [[MIB]] * 5 + [MIB])]


def test_whole_pages_are_unmapped_and_the_ragged_ends_stay():
    allocator = CachingAllocator(EXPANDABLE)
    first, second, third = (allocator.malloc(size * MIB) for size in (15, 50, 15))
    assert allocator.reserved == 80 * MIB
    allocator.free(second)
    allocator.empty_cache()
    # Free: 15 to 65 MiB. Whole pages in it: 20 to 60. 15 to 20 and 60 to 65 share pages with live blocks.
    assert allocator.reserved == 40 * MIB
    assert shape(allocator) == [(20 * MIB, [[15 * MIB], 5 * MIB]), (20 * MIB, [5 * MIB, [15 * MIB]])]
    # The gap is filled first: 5 + 40 + 5 = 50.
    assert allocator.malloc(50 * MIB) == second
    assert allocator.reserved == 80 * MIB
    for handle in (first, second, third):
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


def test_expandable_segments_unmap_before_giving_up():
    allocator = CachingAllocator(EXPANDABLE, capacity=60 * MIB)
    other = allocator.malloc(40 * MIB, stream=1)
    allocator.free(other)
    allocator.malloc(60 * MIB, stream=0)
    assert allocator.reserved == 60 * MIB
    assert [event.action for event in allocator.segment_events] == ["segment_map", "segment_unmap", "segment_map"]


def test_expandable_segments_fragment_less():
    # A step at batch 10 and one at batch 11: 40, 44 MiB. Fixed segments of 40 are of no use for 44.
    fixed, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
    for allocator in (fixed, expandable):
        for size in (40 * MIB, 44 * MIB):
            for handle in [allocator.malloc(size) for _ in range(3)]:
                allocator.free(handle)
    assert fixed.reserved == 3 * 40 * MIB + 3 * 44 * MIB
    # 132 MiB in pages of 20.
    assert expandable.reserved == 140 * MIB


# Wrong use


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(InvalidInputError, match="at least 1 byte"):
        CachingAllocator().malloc(size)


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(InvalidInputError):
        allocator.free(handle)


def test_out_of_memory_is_both_ours_and_pythons():
    assert issubclass(SimulatedOutOfMemory, VramGuardError)
    assert issubclass(SimulatedOutOfMemory, MemoryError)


# replay


def test_replay_names_the_peak_and_who_was_alive():
    # Blocks of 1,000 bytes (1,024), 3,000,000 (3,000,320), 600 (1,024).
    result = replay([0, 1, ~0, 2, ~1, ~2], [1000, 3000000, 600])
    assert (result.peak_allocated, result.peak_event) == (1024 + 3000320, 1)
    assert result.peak_live == {0: 1024, 1: 3000320}
    assert result.peak_reserved == 2 * MIB + 20 * MIB
    assert result.failure is None
    assert result.allocated_curve is None


def test_the_curves_have_a_point_for_every_event():
    result = replay([0, 1, ~0, ~1], [512, 11 * MIB], curve=True)
    assert result.allocated_curve == (512, 512 + 12 * MIB, 12 * MIB, 0)
    assert result.reserved_curve == (2 * MIB, 14 * MIB, 14 * MIB, 14 * MIB)
    assert [segment.total_size for segment in result.segments] == [2 * MIB, 12 * MIB]


def test_blocks_of_no_bytes_are_passed_over():
    result = replay([0, 1, ~0, ~1], [0, 512], curve=True)
    assert (result.peak_event, dict(result.peak_live)) == (1, {1: 512})
    assert result.allocated_curve == (0, 512, 512, 0)


def test_a_replay_stops_where_the_capacity_ends():
    result = replay([0, ~0, 1, 2, ~1], [10 * MIB, 20 * MIB, 14 * MIB], capacity=32 * MIB, curve=True)
    # 10 cached + 20 = 30; 14 more do not fit, also not once the 10 are given back: 20 + 14 = 34.
    assert result.failure == ReplayFailure(event=3, requested=14 * MIB, allocated=20 * MIB, reserved=20 * MIB)
    assert (result.peak_allocated, result.peak_event, result.peak_live) == (20 * MIB, 2, {1: 20 * MIB})
    assert result.peak_reserved == 30 * MIB
    assert len(result.allocated_curve) == 3


def test_streams_are_kept_apart():
    assert replay([0, ~0, 1], [10 * MIB, 10 * MIB]).peak_reserved == 10 * MIB
    assert replay([0, ~0, 1], [10 * MIB, 10 * MIB], streams=[0, 1]).peak_reserved == 20 * MIB


@each(
    ("events", "sizes", "reason"),
    [
        ([0], [-1], "negative size"),
        ([1], [512], "no size"),
        ([~1], [512], "no size"),
        ([0, 0], [512], "second time"),
        ([0, ~0, 0], [512], "second time"),
        ([~0], [512], "not allocated"),
        ([0, ~0, ~0], [512], "not allocated"),
    ],
)
def test_events_that_make_no_sense_are_refused(events, sizes, reason):
    with pytest.raises(InvalidInputError, match=reason):
        replay(events, sizes)


# More bytes are not always more memory


def test_a_larger_batch_can_even_allocate_less():
    # 64 + 5 b, 84 and b quarters of a MiB, at b = 4 and 5; the first is freed before the others come.
    events = [0, ~0, 1, 2]
    # b = 4: 21 MiB take a segment of 22 and keep its last MiB; so do the next 21, in the same segment: 22 + 1 = 23.
    assert replay(events, [21 * MIB, 21 * MIB, MIB]).peak_allocated == 23 * MIB
    # b = 5: 22.25 MiB take a segment of 24. It is split for the next: 21 + 1.25 = 22.25 out of 24.
    assert replay(events, [89 * MIB // 4, 21 * MIB, 5 * MIB // 4]).peak_allocated == 89 * MIB // 4


def test_expandable_segments_can_reserve_less_for_more_as_well():
    events = [0, ~0, 1, 2]
    # 21 MiB: two pages; the third block, of 1 MiB, is small: a page of 2 MiB elsewhere. 42.
    assert replay(events, [21 * MIB, 21 * MIB, MIB], settings=EXPANDABLE).peak_reserved == 42 * MIB
    # 1.25 MiB is large and finds room behind the 21: 40.
    larger = replay(events, [89 * MIB // 4, 21 * MIB, 5 * MIB // 4], settings=EXPANDABLE)
    assert larger.peak_reserved == 40 * MIB


def test_the_allocator_needs_no_torch():
    code = "import sys, vram_guard.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@each(
    ("requested", "available", "granted", "settings"),
    [
        (512, 1024, 512, AllocatorSettings()),  # a small pool keeps every remainder
        (20 * MIB, 21 * MIB, 21 * MIB, AllocatorSettings()),  # a large one what exceeds 1 MiB
        (20 * MIB, 21 * MIB + 512, 20 * MIB, AllocatorSettings()),
        (300 * MIB, 302 * MIB, 300 * MIB, AllocatorSettings()),
        (300 * MIB, 302 * MIB, 302 * MIB, AllocatorSettings(max_split_size=200 * MIB)),  # never split
        (100 * MIB, 102 * MIB, 100 * MIB, AllocatorSettings(max_split_size=200 * MIB)),
        (100 * MIB, 100 * MIB + 512, 100 * MIB + 512, AllocatorSettings(max_split_size=200 * MIB)),
    ],
)
def test_what_a_request_is_granted_of_a_cached_block(requested, available, granted, settings):
    assert CachingAllocator(settings).granted(requested, available) == granted


def test_segments_lie_above_each_other_or_in_stretches_below_that_are_filled_upwards() -> None:
    sizes = (20, 20, 12, 2, 48, 12, 12)  # MiB, of segments
    taken = {}
    for placement in ("above", "below"):
        allocator = CachingAllocator(placement=placement)
        for size in sizes:
            allocator.allocate(size * MIB if size > 2 else 1)
        taken[placement] = [event.address for event in allocator.segment_events]
    above = taken["above"]
    assert [low + size * MIB for low, size in zip(above[:-1], sizes[:-1], strict=True)] == above[1:]
    first = taken["below"][0]
    # The second stretch is full with 12 MiB; 2 MiB go behind the first segment. 64 MiB hold 48 and 12, not another 12.
    offsets = [(address - first) // MIB for address in taken["below"]]
    assert offsets == [0, -32, -12, 20, -96, -48, -128]


def test_segments_that_kernels_need_lie_above_the_weights_until_384_mib_are_full() -> None:
    sizes = [size * MIB for size in (40, 30, 48, 98, 200, 50)]
    loaded = replay([0, 1], sizes, placement="below", curve=True).segments
    ran = replay([0, 1, 2, ~2, 3, 4, 5], sizes, placement="below", curve=True).segments
    first = max(segment.address for segment in loaded)
    assert [(segment.address - first) // MIB for segment in loaded] == [-32, 0]
    # 48, 98 and 50 MiB take 64, 128 and 64 of the 384; 200 MiB do not fit and lie below.
    offsets = {segment.total_size // MIB: (segment.address - first) // MIB for segment in ran}
    assert offsets == {40: 0, 30: -32, 48: 384, 98: 256, 200: -256, 50: 192}
