"""What holds for every sequence of requests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vram_guard.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory, replay

MIB = 2**20

SETTINGS = [
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(max_split_size=20 * MIB),
    AllocatorSettings(max_split_size=25 * MIB, max_non_split_rounding_size=40 * MIB),
    AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    AllocatorSettings(large_segment_size=33 * MIB),
    AllocatorSettings(garbage_collection_threshold=0.4, per_process_memory_fraction=0.9),
    AllocatorSettings(expandable_segments=True, max_split_size=20 * MIB),
]

sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 11 * MIB, 20 * MIB]),
)
capacities = st.one_of(st.none(), st.integers(20 * MIB, 300 * MIB))


class AnyUse(RuleBasedStateMachine):
    """malloc, free and empty_cache in any order, with the invariants looked at after each."""

    @initialize(chosen=st.sampled_from(SETTINGS), capacity=capacities)
    def begin(self, chosen, capacity):
        self.capacity = capacity
        self.allocator = CachingAllocator(chosen, capacity)
        self.live = {}
        self.most = [0, 0]

    @rule(size=sizes, stream=st.integers(0, 2))
    def malloc(self, size, stream):
        handle = failure = None
        try:
            handle = self.allocator.malloc(size, stream)
        except SimulatedOutOfMemory as error:
            failure = error
        if failure is not None:
            assert self.capacity is not None
            # What is still reserved could not be given back: with it, the segment does not fit. (Of expandable
            # segments, a part may have been mapped by then, and only the missing pages did not fit.)
            if not self.allocator.settings.expandable_segments:
                assert failure.reserved + failure.segment > failure.capacity
            return
        assert handle not in self.live
        self.live[handle] = (size, stream)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        handle = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[handle]
        self.allocator.free(handle)

    @rule()
    def empty_cache(self):
        self.allocator.empty_cache()
        for segment in self.allocator.segments():
            assert segment.allocated_size > 0

    @invariant()
    def every_block_has_its_place(self):
        shown = {}
        end = 0
        for segment in self.allocator.segments():
            assert segment.address >= end  # segments do not overlap
            at = segment.address
            for block in segment.blocks:
                assert block.address == at  # blocks neither overlap nor leave gaps
                assert block.size % 512 == 0
                at += block.size
                if block.state == "active_allocated":
                    shown[block.address] = (block.requested_size, segment.stream)
                    assert block.size >= block.requested_size
                    small = self.allocator.round_size(block.requested_size) <= MIB
                    assert small == (segment.segment_type == "small")
            assert at == segment.address + segment.total_size
            end = at
            for one, other in pairwise(segment.blocks):
                assert "active_allocated" in (one.state, other.state)  # free neighbours have merged
        assert shown == self.live

    @invariant()
    def the_sums_agree(self):
        segments = self.allocator.segments()
        assert self.allocator.reserved == sum(segment.total_size for segment in segments)
        assert self.allocator.allocated == sum(segment.allocated_size for segment in segments)
        assert self.allocator.requested == sum(size for size, _ in self.live.values())
        assert self.allocator.reserved >= self.allocator.allocated >= self.allocator.requested

    @invariant()
    def the_peaks_are_maxima_within_the_capacity(self):
        self.most = [max(self.most[0], self.allocator.allocated), max(self.most[1], self.allocator.reserved)]
        assert self.allocator.peak_allocated == self.most[0]
        assert self.allocator.peak_reserved >= self.most[1]
        if self.capacity is not None:
            fraction = self.allocator.settings.per_process_memory_fraction
            assert self.allocator.peak_reserved <= fraction * self.capacity

    @invariant()
    def the_calls_to_the_device_add_up(self):
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        total = most = 0
        for event in self.allocator.segment_events:
            total += signs[event.action] * event.size
            most = max(most, total)
        assert (total, most) == (self.allocator.reserved, self.allocator.peak_reserved)

    @invariant()
    def it_can_be_taken_up_from_its_segments(self):
        other = CachingAllocator(self.allocator.settings)
        other.restore(self.allocator.segments())
        assert other.segments() == self.allocator.segments()
        assert (other.allocated, other.reserved) == (self.allocator.allocated, self.allocator.reserved)

    def teardown(self):
        if not hasattr(self, "allocator"):
            return
        for handle in self.live:
            self.allocator.free(handle)
        self.allocator.empty_cache()
        assert (self.allocator.reserved, self.allocator.allocated, self.allocator.requested) == (0, 0, 0)
        assert self.allocator.segments() == []


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@st.composite
def runs(draw, most=30):
    """Events over blocks, each allocated once and freed at most once, and the blocks' sizes."""
    wanted = draw(st.lists(st.one_of(st.just(0), sizes), min_size=1, max_size=most))
    events = []
    live = []
    for block in range(len(wanted)):
        while live and draw(st.booleans()):
            events.append(~live.pop(draw(st.integers(0, len(live) - 1))))
        events.append(block)
        live.append(block)
    return events, wanted


@settings(max_examples=150, deadline=None)
@given(run=runs(), chosen=st.sampled_from(SETTINGS), capacity=capacities)
def test_a_replay_is_the_allocator_stepped_by_hand(run, chosen, capacity):
    events, wanted = run
    result = replay(events, wanted, settings=chosen, capacity=capacity, curve=True)
    allocator = CachingAllocator(chosen, capacity)
    handles = {}
    curve = []
    failed = None
    for index, event in enumerate(events):
        if event < 0:
            if wanted[~event]:
                allocator.free(handles.pop(~event))
        elif wanted[event]:
            try:
                handles[event] = allocator.malloc(wanted[event])
            except SimulatedOutOfMemory as error:
                failed = (index, error.requested, error.allocated, error.reserved)
                break
        curve.append((allocator.allocated, allocator.reserved))
    assert list(zip(result.allocated_curve, result.reserved_curve, strict=True)) == curve
    assert (result.peak_allocated, result.peak_reserved) == (allocator.peak_allocated, allocator.peak_reserved)
    failure = result.failure
    assert failed == (failure and (failure.event, failure.requested, failure.allocated, failure.reserved))
    assert list(result.segments) == allocator.segments()


@settings(max_examples=150, deadline=None)
@given(run=runs(), chosen=st.sampled_from(SETTINGS), capacity=capacities)
def test_those_alive_at_the_peak_add_up_to_it(run, chosen, capacity):
    events, wanted = run
    result = replay(events, wanted, settings=chosen, capacity=capacity, curve=True)
    assert sum(result.peak_live.values()) == result.peak_allocated
    assert all(granted >= wanted[block] for block, granted in result.peak_live.items())
    if result.peak_allocated:
        assert result.allocated_curve.index(result.peak_allocated) == result.peak_event
    else:
        assert result.peak_live == {}


@settings(max_examples=100, deadline=None)
@given(run=runs(), chosen=st.sampled_from(SETTINGS))
def test_a_run_fits_into_the_memory_it_peaked_at(run, chosen):
    events, wanted = run
    free = replay(events, wanted, settings=chosen)
    if chosen.per_process_memory_fraction < 1:
        return
    assert replay(events, wanted, settings=chosen, capacity=free.peak_reserved) == free


@settings(max_examples=100, deadline=None)
@given(run=runs(), more=st.lists(st.integers(0, MIB), min_size=30, max_size=30))
def test_with_expandable_segments_more_bytes_never_allocate_less(run, more):
    # Every block there is its size rounded up, never more: so no counterexample like the one for fixed segments.
    events, wanted = run
    larger = [size and size + extra for size, extra in zip(wanted, more, strict=False)]
    chosen = AllocatorSettings(expandable_segments=True)
    assert (
        replay(events, larger, settings=chosen).peak_allocated >= replay(events, wanted, settings=chosen).peak_allocated
    )


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**40), divisions=st.sampled_from([0, 1, 2, 4, 8, 16, 2**10]))
def test_rounding_never_shrinks_and_never_doubles(size, divisions):
    rules = CachingAllocator(AllocatorSettings(roundup_power2_divisions=(divisions,) * 16))
    rounded = rules.round_size(size)
    assert size <= rounded <= max(512, 2 * size)
    assert rules.round_size(rounded) == rounded
    assert rules.round_size(size + 1) >= rounded
