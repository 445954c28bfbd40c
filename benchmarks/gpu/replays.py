"""Recorded allocator histories compared with their replay, and the requests in them with the predicted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.records import Measured
from vram_guard import AllocatorSettings, Timeline
from vram_guard.allocator import Recording, RecordingComparison, compare, read_recording, replay

#: Requests below this many bytes are left out where sequences are compared: scalars of losses and scalers.
LEAST_REQUEST = 4096

#: Kinds of requests that are listed.
MOST_LISTED = 8


def history_facts(measured: Measured, snapshot: dict[str, Any], timeline: Timeline) -> dict[str, Any]:
    """One recorded history compared with its replay. Sizes in bytes.

    Returns:
        ``followed_reserved``: the peak where every release of the recorded run is followed; ``replayed_reserved``:
        where the allocations alone are given to a fresh allocator; ``requests``: how the predicted requests differ
        from the recorded ones.
    """
    recording = read_recording(snapshot)
    settings = AllocatorSettings.from_conf(measured.case.allocator)
    followed = compare(recording, settings)
    replayed = replay(
        recording.events, recording.sizes, settings=settings, streams=recording.streams, placement="below"
    )
    return {
        "same_segments": followed.same_segments,
        "first_difference": _difference(followed),
        "segments": len(recording.final),
        "recorded_reserved": followed.recorded_peak_reserved,
        "followed_reserved": followed.simulated_peak_reserved,
        "replayed_reserved": replayed.peak_reserved,
        "requests": requests(measured, recording, timeline),
    }


def told_history(facts: dict[str, Any]) -> str:
    """One line for a history."""
    verdict = "segments the same" if facts["same_segments"] else f"segments DIFFER {facts['first_difference']}"
    followed, replayed = facts["followed_reserved"], facts["replayed_reserved"]
    peaks = f"peak {facts['recorded_reserved']}, followed {followed}, replayed {replayed}"
    return f"  history: {facts['segments']} {verdict}; {peaks}; requests: {facts['requests']}"


def _difference(followed: RecordingComparison) -> str:
    found = followed.first_difference
    if found is not None:
        return f"at entry {found.event}: recorded {found.recorded}, simulated {found.simulated}"
    wrong = [count for count in followed.counts if count.recorded != count.simulated]
    return "; ".join(
        f"{each.recorded} segments of {each.total_size} bytes ({each.segment_type}), simulated {each.simulated}"
        for each in wrong
    )


def requests(measured: Measured, recording: Recording, timeline: Timeline) -> str:
    """The predicted requests of the first two updates compared with the recorded ones: common prefix, differences."""
    if measured.status != "ok" or len(measured.peaks) < 2 or measured.skipped_updates:
        return "not comparable"
    exact = timeline.exact(measured.batch_size)
    sizes = exact.sizes(measured.batch_size)
    predicted = [sizes[event] for event in exact.events if event >= 0 and sizes[event] >= LEAST_REQUEST]
    until = measured.peaks[1][2]
    allocations = [recording.sizes[event] for event in recording.events if event >= 0][:until]
    recorded = [size for size in allocations if size >= LEAST_REQUEST]
    same = common_length(predicted, recorded)
    if same == len(predicted) == len(recorded):
        return f"all {same} the same"
    missed, invented = Counter(recorded) - Counter(predicted), Counter(predicted) - Counter(recorded)
    return (
        f"the first {same} of {len(recorded)} the same; not predicted: {_listed(missed)}; "
        f"only predicted: {_listed(invented)}"
    )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first requests are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (left, right) in pairs if left != right), min(len(one), len(other)))


def _listed(sizes: Counter[int]) -> str:
    """The kinds that matter most."""
    if not sizes:
        return "none"
    heaviest = sorted(sizes.items(), key=lambda item: -item[0] * item[1])
    told = ", ".join(f"{count} x {size}" for size, count in heaviest[:MOST_LISTED])
    return told + (f" and {len(heaviest) - MOST_LISTED} kinds more" if len(heaviest) > MOST_LISTED else "")
