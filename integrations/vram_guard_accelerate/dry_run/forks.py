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
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from vram_guard.errors import LostCopyError, UnsupportedStepError
from vram_guard.forks import ended
from vram_guard.forks.ended import EndedOnceError
from vram_guard.forks.fork import fork_with_generators, write_all
from vram_guard.forks.hanging import HangsError, Patience, abort
from vram_guard.forks.side_effects import discard_writes, way
from vram_guard.forks.tied import Child
from vram_guard.language import _
from vram_guard.limits import END_SECONDS, LOOK_SECONDS
from vram_guard_accelerate.dry_run.time_limit import no_limit


@dataclass(frozen=True)
class ParentPipe:
    """The way from a copy back to the process that asked for it."""

    pipe: int

    def send(self, answer: Any) -> NoReturn:
        """Send the answer and end this copy at once, without the script's own exit handlers.

        Where it cannot be sent, the reason is, and the exit code is not 0.
        """
        no_limit()  # its own answer would end in the middle of this one
        code = 1
        try:
            try:
                data, then = pickle.dumps(answer), 0
            except Exception as error:  # noqa: BLE001 - what a script makes may raise anything
                data, then = pickle.dumps(CannotBeSent(f"{type(error).__name__}: {error}")), 1
            write_all(self.pipe, memoryview(data))
            code = then
        except BrokenPipeError:
            pass  # the original asks no more
        except BaseException:  # noqa: BLE001 - nothing of a copy may go on
            traceback.print_exc()
        finally:
            os._exit(code)


class ForkEntered(BaseException):
    """Raised in a copy, to leave the frames of its caller; holds what the copy is to do."""

    def __init__(self, task: Any, parent: ParentPipe) -> None:
        super().__init__()
        self.task = task
        self.parent = parent


running: set[Child] = set()
"""Copies that have not answered yet."""


@dataclass(frozen=True)
class CannotBeSent:
    """In place of an answer: the reason why it cannot be sent."""

    reason: str


class Fork:
    """A copy of this process, as its original sees it.

    Args:
        process: its number.
        pipe: where its answer comes from.
    """

    def __init__(self, process: int, pipe: int) -> None:
        self._process = Child(process)
        self._pipe = pipe
        running.add(self._process)

    def answer(self, seconds: float, *, may_be_silent: bool = False, watched: bool = False) -> Any:
        """The answer that the copy sends, once.

        Args:
            seconds: when to give up.
            may_be_silent: None is an answer too: the copy ended by itself and sent nothing.
            watched: it is given up as well where neither it nor any of the copies that it has made works.

        Raises:
            EndedOnceError: the copy was ended from outside.
            LostCopyError: the copy died, or did not answer in time.
        """
        data, hangs = None, ""
        patience = Patience(self._process.process, seconds) if watched else None
        try:
            data = _read_to_end(self._pipe, time.monotonic() + seconds, patience)
            if data is not None:
                self._process.ends_within(END_SECONDS)
        except HangsError as error:
            hangs = str(error)
            abort(self._process.process)
        finally:
            os.close(self._pipe)
            running.discard(self._process)
            code = self._process.end()
        if hangs:
            raise LostCopyError(hangs)
        if data is None:
            raise LostCopyError(
                _("the script did not finish two optimizer steps in {seconds} s", seconds=f"{seconds:.0f}")
            )
        answer = _read(data)
        if isinstance(answer, CannotBeSent):
            raise LostCopyError(_("what the script was followed for cannot be sent: {error}", error=answer.reason))
        if answer is not None or (code in (0, None) and may_be_silent):
            return answer
        if ended.from_outside(code):
            raise EndedOnceError(code)
        raise LostCopyError(_death(code or 0))


def answer_of(ask: Callable[[], Fork], what: str, seconds: float, *, begun: Fork | None = None, **how: bool) -> Any:
    """The answer of a copy; where it is ended from outside, that of a second one.

    Args:
        ask: makes a copy.
        what: the copy and what it is to do, in words.
        seconds: as of :meth:`Fork.answer`.
        begun: the first copy, where it is there already.
        **how: as of :meth:`Fork.answer`.

    Raises:
        EndedCopyError: both were ended so.
        LostCopyError: the copy died, or did not answer in time.
    """
    with contextlib.suppress(EndedOnceError):
        return (begun or ask()).answer(seconds, **how)
    try:
        return ask().answer(seconds, **how)
    except EndedOnceError as error:
        raise ended.twice(what, error.code) from error


def _read(data: bytes) -> Any:
    """What a copy has sent; None where it ended before that was all."""
    try:
        return pickle.loads(data)  # noqa: S301 - from our own copy
    except (EOFError, pickle.UnpicklingError):
        return None


def _death(code: int) -> str:
    if code < 0:
        return _("the script was killed by signal {number} while it was followed", number=-code)
    return _("the script ended with exit code {code} while it was followed", code=code)


def fork(task: Any) -> Fork:
    """A copy that begins here: :class:`ForkEntered` is raised in it, with what it is to do."""
    reading, writing = os.pipe()
    sys.stdout.flush()  # what is in its buffers would be written once more
    sys.stderr.flush()
    process = fork_with_generators()
    if process == 0:
        running.clear()  # copies of the original's: they are not this one's to end
        if way():  # what this process writes is seen by none of those that it was copied from
            discard_writes()
        os.close(reading)
        raise ForkEntered(task, ParentPipe(writing))
    os.close(writing)
    return Fork(process, reading)


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
        process.kill()


def _read_to_end(pipe: int, deadline: float, patience: Patience | None) -> bytes | None:
    """All bytes until the other end of a pipe closes; None where ``time.monotonic()`` passes the deadline.

    Raises:
        HangsError: patience has ended before.
    """
    parts: list[bytes] = []
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, *_rest = select.select([pipe], [], [], left if patience is None else LOOK_SECONDS)
        if not ready:
            if patience is None:
                return None
            patience.check()
            continue
        part = os.read(pipe, 2**20)
        if not part:
            return b"".join(parts)
        parts.append(part)
