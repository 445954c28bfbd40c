"""The recorded runs in ``data``, and the files that somebody gives: snapshots of ``torch.cuda.memory._snapshot()``."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from vram_guard.allocator import Recording, read_recordings
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
