"""The recorded runs in ``data``, and the files that somebody gives; both followed by the simulated allocator."""

from __future__ import annotations

import gzip
import time
import zlib
from pathlib import Path

from benchmarks.harness.records import Row
from vram_guard.allocator import Recording, compare, read_recordings
from vram_guard.errors import InvalidInputError

DATA = Path(__file__).parent / "data"
SUFFIX = ".pickle.gz"

#: How the names of the recordings begin -> the public repository on GitHub that they come from, see data/NOTES.md.
SOURCES = {
    "lm-medium-": "Wedsonlin/assignment2-systems",
    "lm-2.7b-": "kkaitlyn111/cs336-a2-systems",
    "nca-": "HugePandaCoder/octree-nca-groupeq",
    "three-gpus-": "Constructor-Sun/code_location",
}

#: An unpacked snapshot above this size (bytes) is refused: 200,000 entries with their frames take a tenth of it.
LARGEST = 2 * 2**30


def names() -> list[str]:
    """The recordings in ``data``."""
    return sorted(path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))


def path_of(name: str) -> Path:
    """The file of a recording in ``data``."""
    return DATA / f"{name}{SUFFIX}"


def source_of(name: str) -> str:
    """The public repository that a recording in ``data`` comes from."""
    return next(source for start, source in SOURCES.items() if name.startswith(start))


def recordings(path: Path) -> list[Recording]:
    """The history of every device that has one; the file may be gzipped.

    Raises:
        InvalidInputError: the file is missing, truncated, no snapshot, or without a history; the message says what to
            do.
    """
    return read_recordings(_unpacked(path) if path.suffix == ".gz" else path)


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(LARGEST + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInputError(f"{path} is cut off or damaged ({error}): pack the snapshot again") from error
    except OSError as error:
        raise InvalidInputError(f"cannot read the snapshot {path}: {error.strerror}") from error
    if len(content) > LARGEST:
        raise InvalidInputError(f"{path} unpacks to more than 2 GiB: record with a smaller max_entries")
    return content


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
    details = {
        "device": recording.device,
        "actions": len(recording.trace),
        "segments": len(recording.final),
        "same_segments": found.same_segments,
        "same_addresses": found.first_displaced_block is None,
        "difference": "" if first is None else f"entry {first.event}: {first.recorded}, not {first.simulated}",
    }
    peaks = found.recorded_peak_reserved, found.simulated_peak_reserved
    return Row(source, name, *peaks, tier="", seconds=round(time.perf_counter() - started, 3), details=details)
