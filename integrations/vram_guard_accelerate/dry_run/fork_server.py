"""A copy of this process that waits where the script stands now, and goes on from there once for every task it is sent.

What is asked for is known later than where it has to begin: the plan is made at the first training batch, but FSDP2
has its say when the model is prepared. So one copy stays behind at that place (:class:`Standby`), and copies itself
again when asked; :class:`vram_guard_accelerate.dry_run.forks.Copy` is for copies that begin where they are asked for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import BecomeCopy, Home

#: Before a task goes its size, before a process's number nothing.
_SIZE = struct.Struct("!I")


class Standby:
    """The copy that waits, as the original sees it; :class:`BecomeCopy` is raised in the copies that it makes."""

    def __init__(self) -> None:
        self._asking, asked = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()  # or a copy would say again what waits to be written
        self._process = os.fork()
        if self._process == 0:
            self._asking.close()
            _wait_for_tasks(asked)
        asked.close()
        forks.running[self._process] = self

    def copy(self, task: Any) -> FarCopy:
        """A copy that does this task (which must be picklable), on its way from where the standby waits.

        Raises:
            UnsupportedStepError: the standby is gone.
        """
        message = pickle.dumps(task)
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._asking, [_SIZE.pack(len(message))], [writing])
            self._asking.sendall(message)
            process = _SIZE.unpack(_received(self._asking, _SIZE.size))[0]
        except (OSError, EOFError) as error:
            os.close(reading)
            raise UnsupportedStepError("the copy of the script that waited at prepare was lost") from error
        finally:
            os.close(writing)
        return FarCopy(process, reading)

    def end(self) -> None:
        """Nobody will ask any more."""
        self._asking.close()
        with contextlib.suppress(OSError):
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        forks.running.pop(self._process, None)


class FarCopy:
    """A copy that the standby made: no child of this process."""

    def __init__(self, process: int, pipe: int) -> None:
        self._process = process
        self._pipe = pipe
        forks.running[process] = self

    def answer(self, seconds: float) -> Any:
        """What the copy sends home, once.

        Args:
            seconds: when to give up.

        Raises:
            UnsupportedStepError: the copy died, or did not answer in time.
        """
        data = None
        try:
            data = forks.read_to_end(self._pipe, time.monotonic() + seconds)
        finally:
            if data is None:
                with contextlib.suppress(OSError):
                    os.kill(self._process, signal.SIGKILL)
            os.close(self._pipe)
            del forks.running[self._process]
        if data is None:
            raise UnsupportedStepError(f"the script did not get through two optimizer steps in {seconds:.0f} s")
        if not data:
            raise UnsupportedStepError("the script died while it was followed")
        return pickle.loads(data)  # noqa: S301 - from our own copy


def _wait_for_tasks(asked: socket.socket) -> NoReturn:
    """Copy this process for every task; raises :class:`BecomeCopy` in the copies."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies: the system buries them
    while True:
        try:
            head, pipes, _, _ = socket.recv_fds(asked, _SIZE.size, 1)
            message = _received(asked, _SIZE.unpack(head)[0])
        except (OSError, EOFError, struct.error):
            os._exit(0)  # the original is gone
        process = os.fork()
        if process == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise BecomeCopy(pickle.loads(message), Home(pipes[0]))  # noqa: S301 - from our own original
        for pipe in pipes:
            os.close(pipe)
        asked.sendall(_SIZE.pack(process))


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the other side is gone.
    """
    parts = []
    while size:
        part = connection.recv(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
