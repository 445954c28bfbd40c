"""Run the rest of this process several times over: each time in a forked copy of it.

A script's loop is there once. A copy of the process, made where the loop asks for its first batch, runs it with another
batch size, another precision, other techniques, and sends home what came out; the original has not moved, and can be
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

from vram_guard.errors import UnsupportedStepError


class BecomeCopy(BaseException):
    """Raised in a copy, to leave the frames of whoever asked for it; holds what the copy is to do."""

    def __init__(self, task: Any, home: Home) -> None:
        super().__init__()
        self.task = task
        self.home = home


@dataclass(frozen=True)
class Home:
    """The way from a copy back to the original."""

    pipe: int

    def send(self, answer: Any) -> NoReturn:
        """Send the answer home and end this copy at once, without any of the script's own goodbyes."""
        data = memoryview(pickle.dumps(answer))
        try:
            while data:
                data = data[os.write(self.pipe, data) :]
        finally:
            os._exit(0)


def check_forks() -> None:
    """Raises UnsupportedStepError where processes cannot be copied (Windows)."""
    if not hasattr(os, "fork"):
        raise UnsupportedStepError(
            "a script's loop is followed in copies of its process (fork), which this system does not have; run "
            "vram-guard launch --dry-run on Linux or macOS with --gpu or --budget"
        )


class Copy:
    """A copy of this process, on its way; :class:`BecomeCopy` is raised in the copy itself.

    Args:
        task: what the copy is to do, see :class:`BecomeCopy`.
    """

    def __init__(self, task: Any) -> None:
        self._pipe, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()  # or a copy would say again what waits to be written
        self._process = os.fork()
        if self._process == 0:
            os.close(self._pipe)
            raise BecomeCopy(task, Home(writing))
        os.close(writing)
        running[self._process] = self

    def answer(self, seconds: float, *, may_be_silent: bool = False) -> Any:
        """What the copy sends home, once.

        Args:
            seconds: when to give up.
            may_be_silent: None is an answer too: the copy ended by itself and had nothing to say.

        Raises:
            UnsupportedStepError: the copy died, or did not answer in time.
        """
        data = None
        try:
            data = read_to_end(self._pipe, time.monotonic() + seconds)
        finally:
            if data is None:
                os.kill(self._process, signal.SIGKILL)
            code = self._ended()
        if data is None:
            raise UnsupportedStepError(f"the script did not get through two optimizer steps in {seconds:.0f} s")
        if not data and code == 0 and may_be_silent:
            return None
        if not data:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise UnsupportedStepError(f"the script {how} while it was followed")
        return pickle.loads(data)  # noqa: S301 - from our own copy

    def _ended(self) -> int:
        os.close(self._pipe)
        del running[self._process]
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


running: dict[int, object] = {}
"""Copies that have not answered yet, and those that wait to be asked, by process number."""


def end_all() -> None:
    """No copy outlives its original."""
    for process in list(running):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def read_to_end(pipe: int, deadline: float) -> bytes | None:
    """Everything until the other end of a pipe closes; None where the time is up.

    Args:
        pipe: a descriptor.
        deadline: by ``time.monotonic()``, in seconds.
    """
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, 2**20)
        if not part:
            return b"".join(parts)
        parts.append(part)
