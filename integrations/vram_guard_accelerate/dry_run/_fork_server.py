"""A copy of this process that waits where the script stands now, and is copied once more for every task it is sent.

What is asked for is known later than where it has to begin: the plan is made at the first training batch, but FSDP2
changes the model when it is prepared. So one copy stays behind at that place (:class:`ForkServer`);
:func:`vram_guard_accelerate.dry_run.forks.fork` makes copies that begin where they are asked for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import struct
from typing import Any, NoReturn

from vram_guard.forks import ended
from vram_guard.forks.fork import fork_with_generators
from vram_guard.forks.tied import Child
from vram_guard.language import _
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forks import Fork, ForkEntered, ParentPipe

#: Before a task goes its size; the answer is the number of the process that does it.
_SIZE = struct.Struct("!I")


class ForkServer:
    """The copy that waits, as the original sees it; :class:`ForkEntered` is raised in the copies that it makes."""

    def __init__(self) -> None:
        self._asking, asked = socket.socketpair()
        process = forks.flushed_fork()
        if process == 0:
            self._asking.close()
            _serve(asked)
        forks.write_apart()  # what the script writes from here on, the server's copies write again
        asked.close()
        self._process = Child(process)
        forks.running[self._process] = self

    def fork(self, task: Any) -> Fork:
        """A copy that does this task (which must be picklable), beginning where the server waits.

        Raises:
            EndedCopyError: the server is gone.
        """
        message = pickle.dumps(task)
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._asking, [_SIZE.pack(len(message))], [writing])
            self._asking.sendall(message)
            process = _SIZE.unpack(_received(self._asking, _SIZE.size))[0]
        except (OSError, EOFError) as error:
            os.close(reading)
            raise ended.missing(_("the copy of the script that waited at prepare was lost")) from error
        finally:
            os.close(writing)
        return Fork(process, reading)

    def end(self) -> None:
        """End the server: no more tasks will come."""
        self._asking.close()
        self._process.end()
        forks.running.pop(self._process, None)


def _serve(asked: socket.socket) -> NoReturn:
    """Copy this process for every task; raises :class:`ForkEntered` in the copies."""
    gc.freeze()  # a copy that looked through all objects would have all their memory
    faulthandler.disable()  # where the server stands tells nobody anything
    copies: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_signal: _ended(copies))
    while True:
        try:
            head, pipes, *_rest = socket.recv_fds(asked, _SIZE.size, 1)
            message = _received(asked, _SIZE.unpack(head)[0])
        except (OSError, EOFError, struct.error):
            os._exit(0)  # the original is gone
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        process = fork_with_generators()
        if process == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for pipe in copies.values():
                os.close(pipe)
            forks.write_apart()
            raise ForkEntered(pickle.loads(message), ParentPipe(pipes[0]))  # noqa: S301 - from our own original
        copies[process] = pipes[0]
        asked.sendall(_SIZE.pack(process))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _ended(copies: dict[int, int]) -> None:
    """Say how copies ended that have not answered: nobody else can wait for them.

    Args:
        copies: their numbers, with the pipes over which they answer.
    """
    for process in list(copies):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            pipe, code = copies.pop(process), os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the original asks no more
                if code:
                    os.write(pipe, pickle.dumps(forks.EndedBy(code)))
            os.close(pipe)


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes; raises EOFError where the other side is gone."""
    parts = []
    while size:
        part = connection.recv(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
