"""Trainings that run under guard, as they tell ``vram-guard monitor`` what was predicted.

Each training process keeps one small file in the cache folder while it trains. Process numbers are those of the process
itself: where a container counts others than the driver does, the monitor finds no file and shows no prediction.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vram_guard.cache import cache_folder
from vram_guard.codec import from_json, to_json
from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically


@dataclass
class Running:
    """One training process. Bytes are ints."""

    pid: int
    started: str
    """The process's start, as the system counts; it tells a later process of the same number apart."""
    predicted: int
    """Peak that PyTorch reserves."""
    context: int
    """The CUDA context's part, by the estimate of the catalogue, which the driver counts among the process's memory."""

    @property
    def expected(self) -> int:
        """Peak of the process's memory as the driver counts it."""
        return self.predicted + self.context

    def write(self) -> None:
        """Tell who watches; a folder that cannot be written costs nothing but that."""
        folder = _folder()
        if folder is None:
            return
        with suppress(InvalidInputError):
            write_atomically(folder / f"{self.pid}.json", to_json(self))

    def forget(self) -> None:
        """The training is over."""
        folder = _folder()
        with suppress(OSError):
            if folder is not None:
                (folder / f"{self.pid}.json").unlink(missing_ok=True)
                folder.rmdir()  # the last one leaves nothing behind


def running_here(predicted: int, context: int) -> Running:
    """This process's training, known to who watches from now on."""
    own = Running(os.getpid(), started(os.getpid()), predicted, context)
    own.write()
    return own


def running() -> dict[int, Running]:
    """The trainings of this user's processes that are alive, by pid; what cannot be read is left out."""
    folder = _folder()
    found: dict[int, Running] = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        with suppress(OSError, ValueError):
            one = from_json(Running, path.read_text(encoding="utf-8"))
            if one.started == started(one.pid) and str(one.pid) == path.stem:
                found[one.pid] = one
    return found


def _folder() -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / "running"


def started(pid: int) -> str:
    """The start of a process: field 22 of /proc/PID/stat (man 5 proc).

    "" where it has ended, whether or not its parent has taken notice of that (states Z and X). Elsewhere "alive", where
    it is, and on Windows always: ``os.kill(pid, 0)`` would send Ctrl-C there.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if sys.platform != "win32":
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
    return "alive"
