"""Copies of this process, which run the rest of a script several times over.

A script's loop is there once. A copy of the process, made where the loop asks for its first batch, runs it with another
batch size, another precision, other techniques, and sends back what came out; the original has not moved, and can be
copied again. Memory is shared between the copies until written to, and symbolic tensors have none.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from vram_guard.errors import LostCopyError, UnsupportedStepError
from vram_guard.forks import hanging
from vram_guard.forks.fork import fork_with_generators, write_all
from vram_guard.forks.hanging import HangsError, Patience, abort
from vram_guard.language import _


@dataclass(frozen=True)
class ParentPipe:
    """The way from a copy back to the process that asked for it."""

    pipe: int

    def send(self, answer: Any) -> NoReturn:
        """Send the answer and end this copy at once, without the script's own exit handlers."""
        try:
            write_all(self.pipe, memoryview(pickle.dumps(answer)))
        finally:
            os._exit(0)


class ForkEntered(BaseException):
    """Raised in a copy, to leave the frames of its caller; holds what the copy is to do."""

    def __init__(self, task: Any, parent: ParentPipe) -> None:
        super().__init__()
        self.task = task
        self.parent = parent


running: dict[int, object] = {}
"""Copies that have not answered yet, and those that wait to be asked, by process number."""


class Fork:
    """A copy of this process, as its original sees it.

    Args:
        process: its number.
        pipe: where its answer comes from.
        is_child: False for a child of the fork server, which waits for it.
    """

    def __init__(self, process: int, pipe: int, *, is_child: bool = True) -> None:
        self._process = process
        self._pipe = pipe
        self._is_child = is_child
        running[process] = self

    def answer(self, seconds: float, *, may_be_silent: bool = False, watched: bool = False) -> Any:
        """The answer that the copy sends, once.

        Args:
            seconds: when to give up.
            may_be_silent: None is an answer too: the copy ended by itself and sent nothing.
            watched: it is given up as well where neither it nor any of the copies that it has made works.

        Raises:
            LostCopyError: the copy died, or did not answer in time.
        """
        data, problem = (
            None,
            _("the script did not finish two optimizer steps in {seconds} s", seconds=f"{seconds:.0f}"),
        )
        patience = Patience(self._process, seconds) if watched else None
        try:
            data = _read_to_end(self._pipe, time.monotonic() + seconds, patience)
        except HangsError as error:
            problem = str(error)
            abort(self._process)
        finally:
            if data is None:
                with contextlib.suppress(OSError):
                    os.kill(self._process, signal.SIGKILL)
            os.close(self._pipe)
            running.pop(self._process, None)
            code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1]) if self._is_child else None
        if data:
            return pickle.loads(data)  # noqa: S301 - from our own copy
        if code == 0 and may_be_silent and data is not None:
            return None
        if data is not None:
            problem = _death(code)
        raise LostCopyError(problem)


def _death(code: int | None) -> str:
    if code is None:
        return _("the script died while it was followed")
    if code < 0:
        return _("the script was killed by signal {number} while it was followed", number=-code)
    return _("the script ended with exit code {code} while it was followed", code=code)


def fork(task: Any) -> Fork:
    """A copy that begins here: :class:`ForkEntered` is raised in it, with what it is to do."""
    reading, writing = os.pipe()
    process = flushed_fork()
    if process == 0:
        os.close(reading)
        raise ForkEntered(task, ParentPipe(writing))
    os.close(writing)
    return Fork(process, reading)


def flushed_fork() -> int:
    """A copy of this process, with nothing in the buffers of the output that it would write once more."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = fork_with_generators()
    if process == 0:
        running.clear()  # copies of the original's: they are not this one's to end
    return process


def check_forks() -> None:
    """Raises UnsupportedStepError where processes cannot be copied (Windows)."""
    if not hasattr(os, "fork"):
        raise UnsupportedStepError(
            _(
                "a script's loop is followed in copies of its process (fork), which this system does not have; run "
                "vram-guard launch --dry-run on Linux or macOS with --gpu or --budget"
            )
        )


def end_all() -> None:
    """End all copies: none outlives its original."""
    for process in list(running):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _read_to_end(pipe: int, deadline: float, patience: Patience | None) -> bytes | None:
    """All bytes until the other end of a pipe closes; None where ``time.monotonic()`` passes the deadline.

    Raises:
        HangsError: patience has ended before.
    """
    parts: list[bytes] = []
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, *_rest = select.select([pipe], [], [], left if patience is None else hanging.LOOK_SECONDS)
        if not ready:
            if patience is None:
                return None
            patience.check()
            continue
        part = os.read(pipe, 2**20)
        if not part:
            return b"".join(parts)
        parts.append(part)
