"""The folder of what is remembered from run to run, and how it stays small."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder of everything that is remembered; None where this user has no such folder.

    ``VRAM_GUARD_CACHE``, else the platform's rule: ``XDG_CACHE_HOME`` or ``~/.cache``, ``~/Library/Caches`` on macOS,
    ``LOCALAPPDATA`` on Windows.
    """
    if own := os.environ.get("VRAM_GUARD_CACHE"):
        return Path(own)
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # XDG: a relative path is to be ignored
        return Path(base) / "vram_guard"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home.joinpath(*(("Library", "Caches") if sys.platform == "darwin" else (".cache",)), "vram_guard")


def forget_oldest(folder: Path, most: int, kinds: tuple[str, ...] = ("*.json",)) -> None:
    """Remove what was not written for the longest time.

    Args:
        folder: whose files are looked at; folders in it are not.
        most: files of each kind that stay.
        kinds: patterns of file names.
    """
    with contextlib.suppress(OSError):  # another process removes them as well
        for kind in kinds:
            for path in sorted(folder.glob(kind), key=lambda path: path.stat().st_mtime)[:-most]:
                path.unlink(missing_ok=True)
