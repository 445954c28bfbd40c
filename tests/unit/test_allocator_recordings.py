"""Snapshots of real runs: reading them safely, and following them with the simulation."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import pickletools
import tracemalloc

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from test_allocator_reference import requests

from vram_guard.allocator import AllocatorSettings, CachingAllocator, compare, read_recording, replay
from vram_guard.errors import InvalidInputError

MIB = 2**20
BASE = 139637976727552

#: What the allocator of torch 2.13.0 (see test_allocator_reference.py) wrote down while it was used like this, the
#: recording beginning at "r": a1 3000000, a2 700, a3 12000000, f1, r, a4 2500000, f3, a5 31000000, f2, a6 900000 on
#: stream 7, f5, empty_cache, a7 5000000, f4.
TRACE = [
    ("alloc", BASE, 2500000, 0),
    ("free_requested", BASE + 3000320, 12000000, 0),
    ("free_completed", BASE + 3000320, 12000000, 0),
    ("segment_alloc", BASE + 23068672, 31457280, 0),
    ("alloc", BASE + 23068672, 31000000, 0),
    ("free_requested", BASE + 20971520, 700, 0),
    ("free_completed", BASE + 20971520, 700, 0),
    ("segment_alloc", BASE + 54525952, 2097152, 7),
    ("alloc", BASE + 54525952, 900000, 7),
    ("free_requested", BASE + 23068672, 31000000, 0),
    ("free_completed", BASE + 23068672, 31000000, 0),
    ("segment_free", BASE + 23068672, 31457280, 0),
    ("segment_free", BASE + 20971520, 2097152, 0),
    ("alloc", BASE + 3000320, 5000000, 0),
    ("free_requested", BASE, 2500000, 0),
    ("free_completed", BASE, 2500000, 0),
]
SEGMENTS = [
    (BASE, 0, "large", [(3000320, 0), (5000192, 5000000), (12971008, 0)]),
    (BASE + 54525952, 7, "small", [(900096, 900000), (1197056, 0)]),
]


def as_snapshot(trace, segments, *, conf="", expandable=False):
    """The dict of torch.cuda.memory._snapshot(), with the keys that torch 2.13 writes."""
    shown = []
    for address, stream, kind, blocks in segments:
        at = address
        inside = []
        for size, requested in blocks:
            state = "active_allocated" if requested else "inactive"
            inside.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": []})
            at += size
        shown.append(
            {
                "device": 0,
                "address": address,
                "total_size": at - address,
                "allocated_size": 0,
                "active_size": 0,
                "requested_size": 0,
                "stream": stream,
                "segment_type": kind,
                "segment_pool_id": (0, 0),
                "is_expandable": expandable,
                "frames": [],
                "blocks": inside,
            }
        )
    entries = [
        {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1, "frames": [{"name": "f"}]}
        for action, address, size, stream in trace
    ]
    return {
        "segments": shown,
        "device_traces": [entries],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf, "max_split_size": -1},
        "external_annotations": [],
    }


@pytest.fixture
def snapshot():
    return as_snapshot(TRACE, SEGMENTS)


# Following a real run


def test_a_real_run_is_followed_segment_by_segment(snapshot):
    recording = read_recording(snapshot)
    result = compare(recording)
    assert result.same_segments
    assert result.first_displaced_block is None
    # 20 + 2 MiB before, and 30 + 2 on top.
    assert result.recorded_peak_reserved == result.simulated_peak_reserved == 54 * MIB
    assert [segment.address for segment in result.simulated] == [BASE, BASE + 54525952]
    assert result.simulated == recording.final


def test_what_stood_before_the_recording_is_found_again(snapshot):
    recording = read_recording(snapshot)
    assert [segment.address for segment in recording.initial] == [BASE, BASE + 20971520]
    first, second = recording.initial
    # 12,000,000 bytes behind 3,000,320 free ones; the allocator rounded them to 12,000,256.
    assert [(b.size, b.requested_size) for b in first.blocks] == [
        (3000320, 0),
        (12000256, 12000000),
        (20971520 - 3000320 - 12000256, 0),
    ]
    assert [(b.size, b.requested_size) for b in second.blocks] == [(1024, 700), (2097152 - 1024, 0)]
    assert recording.sizes == (12000000, 700, 2500000, 31000000, 900000, 5000000)
    assert recording.streams == (0, 0, 0, 0, 7, 0)
    assert recording.events == (0, 1, 2, ~0, 3, ~1, 4, ~3, 5, ~2)
    assert recording.trace_index == (-1, -1, 0, 2, 4, 6, 8, 10, 13, 15)
    assert any("2 blocks (12000700 bytes)" in note for note in recording.notes)
    # 12,000,000 in a segment of 12 MiB, 31,000,000 in 30, 2,500,000 in 20, and two small ones.
    result = replay(recording.events, recording.sizes, streams=recording.streams)
    assert result.peak_reserved == (12 + 30 + 20 + 2 + 2) * MIB


def test_a_segment_that_one_block_filled_is_found_again_without_an_empty_one():
    size = 20 * MIB
    freed = [(action, BASE, size, 0) for action in ("free_requested", "free_completed")]
    (segment,) = read_recording(as_snapshot(freed, [(BASE, 0, "large", [(size, 0)])])).initial
    assert [(block.size, block.requested_size) for block in segment.blocks] == [(size, size)]


def test_a_difference_is_named_with_its_place(snapshot):
    # As if the device had been asked for 32 MiB where 30 are due.
    altered = copy.deepcopy(snapshot)
    for entry in altered["device_traces"][0]:
        if entry["addr"] == BASE + 23068672:
            entry["addr"] = 2 * BASE  # there is room for it
            entry["size"] = 32 * MIB if entry["size"] == 31457280 else entry["size"]
    result = compare(read_recording(altered))
    assert not result.same_segments
    assert result.first_difference == (4, f"segment_alloc {32 * MIB} bytes", "segment_alloc 31457280 bytes")


def test_other_settings_show_as_differences(snapshot):
    result = compare(read_recording(snapshot), AllocatorSettings(roundup_power2_divisions=(2,) * 16))
    # 31,000,000 lie between 16 and 32 MiB; halves of 8 MiB: rounded up to 32 MiB.
    assert result.first_difference == (4, "segment_alloc 31457280 bytes", f"segment_alloc {32 * MIB} bytes")
    assert result.simulated_peak_reserved == result.recorded_peak_reserved + 2 * MIB


def test_the_settings_come_from_the_snapshot(snapshot):
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    assert read_recording(snapshot).settings == AllocatorSettings(max_split_size=64 * MIB)
    del snapshot["allocator_settings"]
    recording = read_recording(snapshot)
    assert recording.settings == AllocatorSettings()
    assert any("defaults are assumed" in note for note in recording.notes)


def test_a_recorder_that_skips_completed_frees_is_understood(snapshot):
    trace = snapshot["device_traces"][0]
    snapshot["device_traces"][0] = [entry for entry in trace if entry["action"] != "free_completed"]
    assert compare(read_recording(snapshot)).same_segments


def test_a_block_that_waits_for_another_stream_is_not_free(snapshot):
    # The last free is requested, but not completed: the block's state says so, too.
    del snapshot["device_traces"][0][15]
    block = snapshot["segments"][0]["blocks"][0]
    block.update(state="active_pending_free", requested_size=2500000)
    recording = read_recording(snapshot)
    assert recording.events[-1] == 5
    assert compare(recording).same_segments


def test_private_pools_are_left_out_and_named(snapshot):
    private = copy.deepcopy(snapshot["segments"][0])
    private.update(address=BASE * 2, segment_pool_id=(0, 1))
    snapshot["segments"].append(private)
    snapshot["device_traces"][0].insert(
        0, {"action": "alloc", "addr": BASE * 2, "size": 5, "stream": 0, "pool_id": (0, 1)}
    )
    recording = read_recording(snapshot)
    assert any("private pools" in note and "1 of their actions" in note for note in recording.notes)
    assert compare(recording).same_segments


def test_other_entries_and_devices_are_passed_over(snapshot):
    other = copy.deepcopy(snapshot["segments"][0])
    other["device"] = 1
    snapshot["segments"].append(other)
    snapshot["device_traces"].append([])
    trace = snapshot["device_traces"][0]
    trace.append({"action": "snapshot", "addr": 0, "size": 5, "stream": 0})
    trace.append({"action": "oom", "device_free": 7, "size": 2**40, "stream": 0})
    assert compare(read_recording(snapshot)).same_segments
    assert read_recording(snapshot, device=1).sizes == (5000000,)
    with pytest.raises(InvalidInputError, match="no trace of device 2"):
        read_recording(snapshot, device=2)


def recorded(conf, seed, skipped=0):
    """A snapshot of a simulated run, its first requests not recorded."""
    allocator = CachingAllocator(AllocatorSettings.from_conf(conf))
    handles, trace, seen = {}, [], 0
    for number, (kind, block, size, stream) in enumerate(requests(seed, 300)):
        steps = []
        if kind == "alloc":
            handles[block] = (allocator.malloc(size, stream), size, stream)
            steps = [("alloc", *handles[block])]
        elif kind == "free":
            gone = handles.pop(block)
            allocator.free(gone[0])
            steps = [("free_requested", *gone), ("free_completed", *gone)]
        else:
            allocator.empty_cache()
        calls = [tuple(event) for event in allocator.segment_events[seen:]]
        seen = len(allocator.segment_events)
        if number >= skipped:
            trace += calls + steps
    segments = [
        (s.address, s.stream, s.segment_type, [(b.size, b.requested_size) for b in s.blocks])
        for s in allocator.segments()
    ]
    return as_snapshot(trace, segments, conf=conf, expandable="expandable" in conf)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    conf=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20", "large_segment_size_mb:33"]),
)
def test_what_the_simulation_did_it_does_again(seed, conf):
    data = pickle.dumps(recorded(conf, seed), protocol=4)
    result = compare(read_recording(data))
    assert result.same_segments
    assert result.first_displaced_block is None
    assert result.recorded_peak_reserved == result.simulated_peak_reserved


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), skipped=st.integers(1, 250))
def test_a_run_joined_late_has_the_same_segments_at_its_start(seed, skipped):
    # Small blocks are always split exactly, so nothing about them is lost when they are freed.
    recording = read_recording(recorded("", seed, skipped))
    before = CachingAllocator()
    handles = {}
    for kind, block, size, stream in requests(seed, 300)[:skipped]:
        if kind == "alloc":
            handles[block] = before.malloc(size, stream)
        elif kind == "free":
            before.free(handles.pop(block))
        else:
            before.empty_cache()
    shown = [(s.address, s.total_size, s.stream, s.segment_type) for s in before.segments()]
    assert [(s.address, s.total_size, s.stream, s.segment_type) for s in recording.initial] == shown
    live = [b.address for s in before.segments() for b in s.blocks if b.state != "inactive"]
    assert [block.address for block in recording.existing] == live
    small = [s for s in before.segments() if s.segment_type == "small"]
    assert [s for s in recording.initial if s.segment_type == "small"] == small


# Snapshots that contradict themselves


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["device_traces"][0][0].update(size=1), "trace entry 0 .*not in use afterwards"),
        (lambda s: s["device_traces"][0][13].update(addr=BASE), "trace entry 13 .*not in use afterwards"),
        (lambda s: s["device_traces"][0][11].update(addr=BASE), "trace entry 11 .*there afterwards"),
        (lambda s: s["device_traces"][0][7].update(addr=5), "trace entry 7 .*no segment shows"),
        (lambda s: s["segments"].pop(0), "not in use afterwards"),
        (lambda s: s["segments"][0]["blocks"].pop(), "do not add up"),
        (lambda s: s["segments"][0].update(blocks=[]), "do not add up"),
        (lambda s: s["segments"][0].update(segment_type="medium"), "neither small nor large"),
        (lambda s: s["segments"][0]["blocks"][0].update(size=-5), "-5 bytes"),
        (lambda s: s["segments"][0].update(address="x"), "no whole number 'address'"),
        (lambda s: s["segments"][0].update(stream=True), "no whole number 'stream'"),
        (lambda s: s["device_traces"][0][0].update(action="vanish"), "unknown action 'vanish'"),
        (lambda s: s["device_traces"][0][0].update(size=2**70), "no whole number 'size'"),
        (lambda s: s["device_traces"][0][0].update(size=-1), "negative size"),
        (lambda s: s["device_traces"][0].insert(0, 5), "unknown action None"),
        (lambda s: s.update(device_traces={}), "not a list"),
        (lambda s: s.pop("device_traces"), "expected a dict with device_traces"),
    ],
)
def test_a_snapshot_that_makes_no_sense_is_refused(snapshot, change, reason):
    change(snapshot)
    with pytest.raises(InvalidInputError, match=reason):
        read_recording(snapshot)


# Files


@pytest.mark.parametrize("protocol", [2, 3])
def test_more_values_than_a_byte_numbers_are_plain(snapshot, protocol):
    """From the 256th on, these protocols write a value's number in four bytes (LONG_BINPUT)."""
    snapshot["device_traces"][0][0]["frames"] = [f"frame {number}" for number in range(600)]
    data = pickle.dumps(snapshot, protocol=protocol)
    assert pickle.LONG_BINPUT in {opcode.code.encode("latin-1") for opcode, _, _ in pickletools.genops(data)}
    assert read_recording(data) == read_recording(snapshot)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no\.pickle"):
        read_recording(tmp_path / "no.pickle")


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "huge.pickle"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2 * 2**30 + 1)  # sparse: it takes no space
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="max_entries"):
            read_recording(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_cut_off_anywhere_is_refused(snapshot):
    data = pickle.dumps(snapshot, protocol=4)
    for length in range(0, len(data), 37):
        with pytest.raises(InvalidInputError):
            read_recording(data[:length])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_byte_never_ends_in_another_error(at, byte):
    data = bytearray(pickle.dumps(as_snapshot(TRACE, SEGMENTS), protocol=4))
    data[at % len(data)] = byte
    with contextlib.suppress(InvalidInputError):  # anything else fails the test
        read_recording(bytes(data))


class Payload:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_snapshot_is_not_run(snapshot, tmp_path, protocol):
    trap = tmp_path / "sprung"
    snapshot["device_traces"][0][0]["frames"] = [Payload(trap)]
    data = pickle.dumps(snapshot, protocol=protocol)
    with pytest.raises(InvalidInputError, match="refused"):
        read_recording(data)
    assert not trap.exists()
    pickle.loads(data)  # it would have worked
    assert trap.exists()


@each(
    "data",
    [
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BYTEARRAY8 of 2**63 bytes
        b"\x80\x04]r\xff\xff\xff\x7f.",  # memo entry 2**31: 16 GiB of room
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a string of 2**63 bytes
        b"\x80\x04X\xff\xff\xff\x7f.",  # a string of 2 GiB, cut off
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # an integer of 2 GiB
        b"\x80\x04Pother\n.",  # a persistent id
        b"\x80\x04\x82\x01.",  # a registered extension
        b"cos\nsystem\n(S'true'\ntR.",  # protocol 0
        b"(i__main__\nX\n.",  # an instance
        b"\x80\x04}]\x8c\x01as.",  # an unhashable key
        b"\x80\x04.",  # nothing on the stack
        b"\x80\x09N.",  # an unknown protocol
        b"PK\x03\x04",  # an archive
        b"{}",  # JSON
        b"",
    ],
)
def test_hostile_bytes_are_refused(data):
    with pytest.raises(InvalidInputError):
        read_recording(data)
