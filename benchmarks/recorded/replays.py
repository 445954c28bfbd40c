"""Recorded histories followed by the simulated allocator."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.harness.records import Row
from benchmarks.recorded.recordings import recordings
from vram_guard.allocator import Recording, compare


def replayed(path: Path, name: str, source: str) -> list[Row]:
    """A row for every device of a recording that has a history; measured and predicted are reserved peaks in bytes.

    ``details``: ``device``; ``actions`` of the history; ``segments`` at its end; ``same_segments``: they were taken and
    given back alike all along; ``same_addresses``: every block lay where the GPU's did; ``difference``: the first one.
    """
    return [_row(name, source, recording) for recording in recordings(path)]


def _row(name: str, source: str, recording: Recording) -> Row:
    started = time.perf_counter()
    found = compare(recording)
    first = found.first_difference or found.first_displaced_block
    return Row(
        source=source,
        name=name,
        measured=found.recorded_peak_reserved,
        predicted=found.simulated_peak_reserved,
        tier="",
        seconds=round(time.perf_counter() - started, 3),
        details={
            "device": recording.device,
            "actions": len(recording.trace),
            "segments": len(recording.final),
            "same_segments": found.same_segments,
            "same_addresses": found.first_displaced_block is None,
            "difference": "" if first is None else f"entry {first.event}: {first.recorded}, not {first.simulated}",
        },
    )
