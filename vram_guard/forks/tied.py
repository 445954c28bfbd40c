"""Copies of a process that end with it, however it ends, and with them the programs that they have started.

A signal on the parent's death (prctl(2)) is one on the death of the *thread* that made the copy. So a process holds a
pipe open, and the kernel kills the group of every copy as soon as that pipe closes (``F_SETSIG``, fcntl(2)). What a
copy starts belongs to its group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vram_guard.forks.hanging import made_by
from vram_guard.patching import replace_attributes

#: As it is before :func:`keep_programs`, of whose effect a copy of a copy is free.
_lead_group: Callable[[int, int], None] = getattr(os, "setpgid", lambda *_numbers: None)

#: fcntl(2), Linux: the signal that is sent where a file with O_ASYNC changes.
_F_SETSIG = 10

#: The pipe of this process, and the device and number by which it is known again: the user's code may close files.
_pipe: tuple[int, int, tuple[int, int]] | None = None


def prepare() -> None:
    """To be called before this process is copied."""
    global _pipe  # noqa: PLW0603 - one for the process
    if sys.platform == "linux" and not (_pipe is not None and _is_pipe(_pipe[0]) and _is_pipe(_pipe[1])):
        reading, writing = os.pipe()
        found = os.fstat(writing)
        _pipe = reading, writing, (found.st_dev, found.st_ino)


def tie() -> None:
    """To be called first in a copy: it leads a group of its own, which is killed when its original is gone."""
    global _pipe
    _lead_group(0, 0)
    keep_programs()
    held, _pipe = _pipe, None
    if held is None or sys.platform != "linux":
        return
    import fcntl

    own = os.open(f"/proc/self/fd/{held[0]}", os.O_RDONLY | os.O_NONBLOCK)  # its flags are no other copy's
    os.close(held[0])
    tying.clear()  # what ties the original to its own
    tying.add(own)
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if _changes(own, 0):  # it is gone already
        os._exit(1)


def keep_programs() -> None:
    """From now on, in this process, what it starts stays in its group, so that it can be ended with it."""
    popen: Any = subprocess.Popen.__init__
    if hasattr(popen, "__wrapped__"):
        return

    def started(process: Any, *args: Any, **kwargs: Any) -> None:
        popen(process, *args, **{**kwargs, **{name: none for name, none in _OWN_GROUP.items() if name in kwargs}})

    started.__wrapped__ = popen  # type: ignore[attr-defined]
    replace_attributes(subprocess.Popen, {"__init__": started})
    names = [name for name in ("setsid", "setpgid", "setpgrp") if hasattr(os, name)]  # for preexec_fn, daemons
    replace_attributes(os, dict.fromkeys(names, lambda *_numbers: None))


#: Arguments of ``subprocess.Popen`` that put a program into a group of its own, with those that do not.
_OWN_GROUP = {"start_new_session": False, "process_group": None}


def _changes(number: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(number, select.POLLIN)
    return bool(watched.poll(seconds * 1000))


tying: set[int] = set()
"""Files of this copy that tie it to its original: they stay open."""


def _let_go() -> None:
    """In every other child of this process, which may live longer: only this process holds the pipe open."""
    if _pipe is not None and _is_pipe(_pipe[1]):
        os.close(_pipe[1])


def _is_pipe(number: int) -> bool:
    with contextlib.suppress(OSError):
        found = os.fstat(number)
        return _pipe is not None and (found.st_dev, found.st_ino) == _pipe[2]
    return False


class Child:
    """A copy of this process, by a handle that stays its own when its number is given to another process.

    Args:
        process: its number.

    Attributes:
        process: that number.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self._handle = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(process)

    def ends_within(self, seconds: float) -> bool:
        """True if it has ended by then; False too where the system does not say."""
        return self._handle >= 0 and _changes(self._handle, seconds)

    def kill(self) -> None:
        """Kill it, and what it has started."""
        for process in list(self._others()):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            else:
                os.kill(self.process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process, signal.SIGKILL)

    def end(self) -> int | None:
        """Kill it, and wait for its end.

        Returns:
            Its exit code, the negative number of a signal that had ended it; None where something else of this process
            has waited for it (a handler of SIGCHLD, or one that ignores it).
        """
        self.kill()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        except ChildProcessError:
            return None
        finally:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1

    def _others(self) -> Iterator[int]:
        """Programs below it, also those in sessions of their own."""
        if self._handle < 0 or not self.ends_within(0):
            yield from (number for number in made_by(self.process) if number != self.process)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
