"""What a copy of a process inherits beside memory, cut off: open files, connections, shared memory, threads, signals.

Files that the original writes become files that are thrown away, connections to other processes become dead ones, and
shared memory becomes memory of the copy's own. What is opened for writing afterwards is a matter of its own, see
:mod:`vram_guard.forks.side_effects`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path

from vram_guard.forks import tied
from vram_guard.forks._shared_memory import make_private
from vram_guard.limits import LARGEST_FILE_COPIED
from vram_guard.patching import replace_attributes


def isolate(kept: set[int]) -> None:
    """Called first in a copy of a process.

    Args:
        kept: file descriptors that stay as they are: those over which the copy answers.
    """
    import torch

    for number in (signal.SIGINT, signal.SIGTERM):  # the framework's handlers are the original's
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of its pool were not copied
    sys.dont_write_bytecode = True
    _cut_off_files(kept | tied.tying)
    _keep_open(kept | tied.tying)
    _renew_output()
    make_private()


def _cut_off_files(kept: set[int]) -> None:
    import fcntl

    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in _open_files() - {*kept, nowhere}:
        try:
            kind = os.fstat(number).st_mode
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:
            continue
        if number in (1, 2) or stat.S_ISFIFO(kind):
            os.dup2(nowhere, number)
        elif stat.S_ISSOCK(kind):
            _disconnect(number)
        elif stat.S_ISREG(kind) and flags & os.O_ACCMODE != os.O_RDONLY:
            _throw_away(number, nowhere, flags)


def _keep_open(kept: set[int]) -> None:
    """User code that closes all files, as daemons do, leaves these open."""
    close, close_range = os.close, os.closerange

    def closed(number: int) -> None:
        if number not in kept:
            close(number)

    def range_closed(low: int, high: int) -> None:
        for number in sorted(one for one in kept if low <= one < high):
            close_range(low, number)
            low = number + 1
        close_range(low, high)

    replace_attributes(os, {"close": closed, "closerange": range_closed})


def _renew_output() -> None:
    """Other streams for what is printed and logged: another thread may have held the locks of the old ones."""
    old = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    new = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = new  # type: ignore[misc]
    for reference in logging._handlerList:  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public list of all
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and any(handler.stream is one for one in old):
            handler.stream = new


def _open_files() -> set[int]:
    try:
        return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    except OSError:  # no /proc: those that a process usually has
        return set(range(256))


def _disconnect(number: int) -> None:
    """Reading from the connection ends at once, and writing to it fails as after a hang-up."""
    ours, theirs = socket.socketpair()
    theirs.close()
    os.dup2(ours.fileno(), number)
    ours.close()


def _throw_away(number: int, nowhere: int, flags: int) -> None:
    if flags & os.O_ACCMODE == os.O_WRONLY:
        os.dup2(nowhere, number)
        return
    if os.fstat(number).st_size > LARGEST_FILE_COPIED:
        return
    at = os.lseek(number, 0, os.SEEK_CUR)
    with Path(f"/proc/self/fd/{number}").open("rb") as theirs, os.fdopen(os.memfd_create("copied"), "w+b") as mine:
        shutil.copyfileobj(theirs, mine)
        mine.flush()
        os.dup2(mine.fileno(), number)
    os.lseek(number, at, os.SEEK_SET)
