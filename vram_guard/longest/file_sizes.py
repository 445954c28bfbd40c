"""Sizes of pictures, remembered from run to run; a file that has changed since is read again.

Where a time limit ends the reading, the next run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.longest._headers import picture_size

VERSION = 1
MOST_FILES = 64
"""Data sets that are remembered; the longest unused go first."""
MOST_PICTURES = 100_000
"""Pictures of one data set that are remembered: some megabytes."""

Entry = tuple[int, int, int, int]
"""Time of the last change in nanoseconds, bytes, height, width."""


@dataclass(frozen=True)
class FileSizes:
    """Sizes of the pictures of one data set, by the number of the sample."""

    key: str
    """Made from the paths of all of them, in order."""
    entries: dict[int, Entry] = field(default_factory=dict)

    def save(self) -> None:
        """Keep them, where this user has a cache; a read-only home is fine."""
        from vram_guard.report.files import NotWrittenWarning, write_atomically

        folder = _folder()
        if folder is None or not self.entries:
            return
        kept = dict(list(self.entries.items())[:MOST_PICTURES])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotWrittenWarning)
            content = {"version": VERSION, "key": self.key, "entries": kept}
            if write_atomically(folder / f"{self.key}.json", json.dumps(content)):
                forget_oldest(folder, MOST_FILES)


class PictureReader:
    """Height and width of each of these pictures.

    Args:
        paths: of all samples, in order.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        digest = hashlib.sha256("\n".join([os.getcwd(), *paths]).encode("utf-8", "surrogateescape"))  # noqa: PTH109
        self._known = _remembered(digest.hexdigest()[:24])
        self.sizes = FileSizes(self._known.key)
        """Those that were asked for."""

    def __call__(self, number: int) -> tuple[int, int]:
        """One of them; see :func:`picture_size` for what is raised."""
        path = self._paths[number]
        state = os.stat(path)  # noqa: PTH116 - ten thousand times
        known = self._known.entries.get(number)
        if known is None or known[:2] != (state.st_mtime_ns, state.st_size):
            known = (state.st_mtime_ns, state.st_size, *picture_size(path))
        self.sizes.entries[number] = known
        return known[2:]

    def learned(self) -> FileSizes:
        """What is to be kept: also that of files which this run did not come to."""
        return FileSizes(self._known.key, {**self._known.entries, **self.sizes.entries})


def _folder() -> Path | None:
    base = cache_folder()
    return None if base is None else base / "sizes"


def _remembered(key: str) -> FileSizes:
    folder = _folder()
    try:
        content = json.loads((folder / f"{key}.json").read_bytes()) if folder is not None else {}
        if content.get("version") == VERSION and content.get("key") == key:
            entries = {int(number): _entry(one) for number, one in content["entries"].items()}
            return FileSizes(key, entries)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # there is none, or none of ours: it is written anew
    return FileSizes(key)


def _entry(one: list[int]) -> Entry:
    changed, size, height, width = map(int, one)
    return changed, size, height, width
