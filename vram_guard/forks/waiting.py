"""A copy of this process that waits: it stays as the process was, and does work later, each time in a copy of its own.

Autograd of a torch with CUDA starts threads at its first backward pass, and refuses to run in copies that are made
afterwards: what will need a copy then has one made before.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, TypeVar

from vram_guard.forks.ended import missing
from vram_guard.forks.exclusive import alone_in_process, renew_in_copy
from vram_guard.forks.fork import ForkRefusedError, as_picklable, can_fork, fork_with_generators, run_in_fork
from vram_guard.forks.isolation import isolate
from vram_guard.forks.tied import Child
from vram_guard.language import _

A = TypeVar("A")
R = TypeVar("R")


class WaitingCopy(Generic[A, R]):
    """A copy that waits for arguments; it ends with this object.

    Args:
        work: called with an argument in a copy of the copy.

    Raises:
        ForkRefusedError: there is no fork on this system.
    """

    def __init__(self, work: Callable[[A], R]) -> None:
        if not can_fork():
            raise ForkRefusedError(_("this system cannot copy a process (fork)"))
        (asked, self._asking), (self._answers, answering) = Pipe(duplex=False), Pipe(duplex=False)
        with alone_in_process():
            try:
                process = fork_with_generators()
            except OSError as error:
                raise ForkRefusedError(_("the process could not be copied: {error}", error=error)) from error
        if process == 0:
            _wait_for_work(work, asked, answering)
        asked.close()
        answering.close()
        weakref.finalize(self, _end, Child(process), self._asking, self._answers)

    def __call__(self, argument: A) -> R:
        """The result of the work on this argument.

        Raises:
            LostCopyError: the copy that did the work died or hung.
            EndedCopyError: it was ended from outside, as was a second one; or this one was.
            Exception: what the work raised.
        """
        try:
            self._asking.send((argument,))
            kind, value = self._answers.recv()
        except (EOFError, OSError) as error:
            raise missing(_("the copy of the process that waited to look at the training was ended")) from error
        if kind == "error":
            raise value
        return value  # type: ignore[no-any-return]


def _wait_for_work(work: Callable[[Any], Any], asked: Connection, answering: Connection) -> None:
    """Called in the copy; it never returns."""
    try:
        renew_in_copy()
        isolate({asked.fileno(), answering.fileno()})
        while True:
            (argument,) = asked.recv()
            try:
                answer = "value", run_in_fork(lambda _progress: work(argument))  # noqa: B023
            except Exception as error:  # noqa: BLE001 - the original raises it
                answer = "error", as_picklable(error)
            answering.send(answer)
    finally:  # nothing of a copy may go on in the original's name
        os._exit(0)


def _end(process: Child, *pipes: Connection) -> None:
    for pipe in pipes:
        pipe.close()
    process.end()
