"""Work in a forked copy of this process, which sends home what it found and ends; the original stays as it was.

The copy shares memory with its original until either writes. It starts with one thread, the one that forked; what it
inherits beside memory (open files, connections, shared memory) is cut off first, see
:mod:`vram_guard.forks.isolation`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, Generic, NoReturn, TypeVar, cast

from vram_guard.call_room import with_room
from vram_guard.errors import LostCopyError, UnsupportedStepError
from vram_guard.forks import autograd_threads, ended, queues, tied
from vram_guard.forks.ended import EndedOnceError
from vram_guard.forks.exclusive import alone_in_process, renew_in_copy
from vram_guard.forks.fatal_stack import FatalStack
from vram_guard.forks.hanging import HangsError, Patience, abort
from vram_guard.forks.host_copies import HostCopies
from vram_guard.forks.isolation import isolate
from vram_guard.forks.side_effects import discard_writes
from vram_guard.language import _
from vram_guard.limits import COPY_SECONDS, END_SECONDS, LOOK_SECONDS
from vram_guard.user_code import line_of_error, raised_here

T = TypeVar("T")

Progress = Callable[[str], None]

#: Parts of messages with which CUDA and torch's autograd refuse to work in a copy of a process that has used a GPU.
_REFUSED_IN_FORKS = (
    "Cannot re-initialize CUDA in forked subprocess",
    "combination with fork-based multiprocessing",
    "CUDA error: initialization error",
)


class ForkRefusedError(UnsupportedStepError):
    """The work needs what a copy of the process cannot have: there is no fork here, or CUDA was used before."""


class _RemoteTraceback(Exception):  # noqa: N818 - it is shown as the cause of the error, and never raised
    """The traceback of an error in the copy, as text; the line of the user's code that it passed; who raised it."""

    def __init__(self, text: str, line: str = "", *, ours: bool = False) -> None:
        super().__init__(text)
        self._text = text
        self.line = line
        self.ours = ours

    def __str__(self) -> str:
        return f"\n{self._text}"


def line_that_failed(error: Exception) -> str:
    """The innermost line of the user's code that an error has passed, in a copy or here; "" if there is none."""
    cause = error.__cause__
    return cause.line if isinstance(cause, _RemoteTraceback) else line_of_error(error)


def is_ours(error: Exception) -> bool:
    """True if this package raised an error, in a copy or here."""
    cause = error.__cause__
    return cause.ours if isinstance(cause, _RemoteTraceback) else raised_here(error)


def can_fork() -> bool:
    """True where a copy of the process works reliably: on Linux (macOS' own libraries do not survive a fork)."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def fork_with_generators() -> int:
    """``os.fork``, but the copy ends with its original and draws as it does, autograd uses no GPU, and no queue waits.

    Example:
        >>> fork_with_generators()  # doctest: +SKIP
        4711
    """
    generators = random.getstate()
    tied.prepare()
    process = os.fork()
    if process == 0:
        tied.tie()
        ended.forget()
        random.setstate(generators)
        autograd_threads.start_without_gpus()
        queues.wait_for_nobody()
    return process


def run_in_fork(
    work: Callable[[Progress], T], progress: Progress | None = None, *, most_seconds: float = COPY_SECONDS
) -> T:
    """Call ``work`` in a copy of this process.

    Args:
        work: called in the copy with a function that sends a line of text home; its result and what it raises are
            pickled.
        progress: called here with these lines.
        most_seconds: when to give up.

    Returns:
        The result of ``work``.

    Raises:
        ForkRefusedError: there is no fork on this system, or the work cannot be done in one.
        LostCopyError: the copy died or hung.
        EndedCopyError: the copy was ended from outside, and so was a second one.
        Exception: what ``work`` raised; its traceback in the copy is the error's cause.

    Example:
        >>> seen = []
        >>> run_in_fork(lambda _progress: seen.append(1) or len(seen)), seen
        (1, [])
    """
    what = _("the copy of the process that looked at the training")
    return answer_of(lambda: begin_in_fork(work), what, most_seconds, progress=progress)


def answer_of(
    begin: Callable[[], Copy[T]],
    what: str,
    most_seconds: float,
    begun: Copy[T] | None = None,
    progress: Progress | None = None,
) -> T:
    """The answer of a copy; where it is ended from outside, that of a second one.

    Args:
        begin: makes a copy.
        what: the copy and what it is to do, in words.
        most_seconds: when to give up.
        begun: the first copy, where it is there already.
        progress: called with its lines.

    Raises:
        EndedCopyError: both were ended so.
        LostCopyError: the copy died or hung.

    Example:
        >>> answer_of(lambda: begin_in_fork(lambda _progress: 6 * 7), "the copy", 60)
        42
    """
    with contextlib.suppress(EndedOnceError):
        return (begun or begin()).answer(progress, most_seconds=most_seconds)
    try:
        return begin().answer(progress, most_seconds=most_seconds)
    except EndedOnceError as error:
        raise ended.twice(what, error.code) from error


def begin_in_fork(work: Callable[[Progress], T]) -> Copy[T]:
    """As :func:`run_in_fork`, while the caller goes on; the copy is to be asked for its answer, or ended.

    Raises:
        ForkRefusedError: there is no fork on this system.

    Example:
        >>> copy = begin_in_fork(lambda _progress: 6 * 7)
        >>> copy.answer()
        42
    """
    if not can_fork():
        raise ForkRefusedError(_("this system cannot copy a process (fork)"))
    values = HostCopies()
    with alone_in_process():  # no copy of a torch that another thread's trace has half replaced
        copy = fork_here()
    if isinstance(copy, Home):
        _work_in_copy(work, copy, values)
    return copy


def fork_here() -> Copy[Any] | Home:
    """A copy that goes on where this returns: there the way home, here the copy, which is to be asked or ended.

    Raises:
        ForkRefusedError: the system has no room for it.

    Example:
        >>> copy = fork_here()
        >>> if isinstance(copy, Home):
        ...     copy.answer(6 * 7)
        >>> copy.answer()
        42
    """
    here, there = Pipe(duplex=False)
    stack = FatalStack()
    for stream in (sys.stdout, sys.stderr):  # what is in their buffers would be written once more
        with contextlib.suppress(Exception):
            stream.flush()
    try:
        process = fork_with_generators()
    except OSError as error:
        raise ForkRefusedError(_("the process could not be copied: {error}", error=error)) from error
    if process == 0:
        here.close()
        stack.write_when_killed()
        return Home(there, stack)
    there.close()
    return Copy(tied.Child(process), here, stack)


class Copy(Generic[T]):
    """A copy of the process that works.

    Args:
        process: the copy.
        pipe: where its messages arrive.
        stack: where it writes its stack when it is killed.
    """

    def __init__(self, process: tied.Child, pipe: Connection, stack: FatalStack) -> None:
        self._process = process
        self._pipe = pipe
        self._stack = stack

    def answer(self, progress: Progress | None = None, *, most_seconds: float = COPY_SECONDS) -> T:
        """Wait for the result; the copy is gone afterwards. Arguments, result and errors are :func:`run_in_fork`'s.

        Raises:
            EndedOnceError: the copy was ended from outside.
        """
        with self._pipe, contextlib.closing(self._stack):
            told = progress or (lambda _line: None)
            kind, value, buffers = _answer(self._pipe, self._process, self._stack, told, most_seconds)
        if kind == "error":
            caught, text, line, ours = value
            if any(part in str(caught) for part in _REFUSED_IN_FORKS):
                raise ForkRefusedError(str(caught))
            raise caught from _RemoteTraceback(text, line, ours=ours)
        return cast("T", pickle.loads(value, buffers=buffers))  # noqa: S301 - from our own copy

    def end(self) -> None:
        """End the copy, whose answer nobody needs."""
        with self._pipe, contextlib.closing(self._stack):
            self._process.end()


# --- in the copy ---------------------------------------------------------------------------------------------------


class Home:
    """The way from a copy back to its original.

    Args:
        pipe: where the original listens.
        stack: where this copy writes its stack when it is killed.
    """

    def __init__(self, pipe: Connection, stack: FatalStack) -> None:
        self.pipe = pipe
        self.numbers = {pipe.fileno(), stack.number}
        """Descriptors of files that have to stay open."""
        self._stack = stack

    def answer(self, value: object) -> NoReturn:
        """Send the result and end this copy at once, without the exit handlers of the process."""
        code, message = 1, tuple[Any, ...]()
        try:
            try:
                message = "value", pickle.dumps(value), []
            except Exception as error:  # noqa: BLE001 - what users make may raise anything
                why = f"{type(error).__name__}: {error}"
                lost = LostCopyError(_("what the copy of the process has found cannot be sent: {error}", error=why))
                message = "error", (lost, "", "", True), []
            self.pipe.send(message)
            code = 0
        except BrokenPipeError:
            pass  # the original asks no more
        except BaseException:  # noqa: BLE001 - nothing of a copy may go on
            traceback.print_exc()
        finally:
            os._exit(code)


def _work_in_copy(work: Callable[[Progress], Any], home: Home, values: HostCopies) -> NoReturn:
    """Do the work, send what came of it, and end without the exit handlers of the process."""
    code = 1
    try:
        renew_in_copy()
        gc.freeze()  # finalizers of the original's objects are not run here
        isolate(home.numbers)
        discard_writes()
        values.take_over()
        buffers: list[pickle.PickleBuffer] = []
        outcome = with_room(_outcome, work, home.pipe, buffers)
        home.pipe.send((*outcome, [buffer.raw().nbytes for buffer in buffers]))
        for buffer in buffers:
            write_all(home.pipe.fileno(), buffer.raw())
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of a copy may go on in the original's name
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(code)


def _outcome(work: Callable[[Progress], Any], home: Connection, buffers: list[pickle.PickleBuffer]) -> tuple[str, Any]:
    try:
        value = work(lambda line: home.send(("progress", line, [])))
        if missing := ended.not_known():
            return "error", (missing, "", "", True)
        # Arrays may be as large as a model: they are not copied into the pickle.
        return "value", pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except SystemExit as left:
        error: Exception = UnsupportedStepError(
            _("the training's own code ended the process (exit code {code})", code=left.code)
        )
        return "error", (error, traceback.format_exc(), "", False)
    except Exception as caught:  # noqa: BLE001 - the user's own code runs in it and may raise anything
        text = "".join(traceback.format_exception(caught))
        return "error", (as_picklable(caught), text, line_of_error(caught), raised_here(caught))


def write_all(pipe: int, content: memoryview) -> None:
    """Send bytes as they lie: a Connection copies them, and takes several times as long to read."""
    while content:
        content = content[os.write(pipe, content) :]


def as_picklable(error: Exception) -> Exception:
    """The error, or one of its name and words where it does not survive pickling."""
    with contextlib.suppress(Exception):  # constructors of the user's errors may raise anything
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        if type(again) is type(error) and str(again) == str(error):
            return error
    words = f"{type(error).__name__}: {error}"
    known: Any = next((base for base in type(error).__mro__ if base.__module__ == "builtins"), Exception)
    with contextlib.suppress(TypeError):  # UnicodeDecodeError and the like want other arguments
        return cast("Exception", known(words))
    return RuntimeError(words)


# --- in the original -----------------------------------------------------------------------------------------------


def _answer(
    pipe: Connection, process: tied.Child, stack: FatalStack, progress: Progress, most_seconds: float
) -> tuple[str, Any, list[bytearray]]:
    """The copy's last message, and the arrays that follow it; the copy is gone afterwards."""
    hangs, closed = "", False
    try:
        for kind, value, buffers in _messages(pipe, process.process, most_seconds):
            if kind != "progress":
                return kind, value, buffers
            progress(value)
        closed = not process.ends_within(END_SECONDS)
    except HangsError as error:
        hangs = str(error)
        abort(process.process)
    finally:
        # One that has answered ends by itself at once: nothing is lost by not waiting for it.
        code = process.end()
    place = _RemoteTraceback(stack.text()) if stack.place() else None
    if hangs:
        raise LostCopyError(stack.located(hangs)) from place
    if closed and code == -signal.SIGKILL:  # ours
        raise LostCopyError(
            _("the training's own code closed the connection over which the copy of the process answers")
        )
    if ended.from_outside(code):
        raise EndedOnceError(code)
    raise LostCopyError(stack.located(_death(code or 0))) from place


def _death(code: int) -> str:
    if code < 0:
        return _("the copy of the process that looked at the training was killed by signal {number}", number=-code)
    return _("the copy of the process that looked at the training ended with exit code {code}", code=code)


def _array(pipe: Connection, size: int) -> bytearray:
    content = bytearray(size)
    missing = memoryview(content)
    while missing:
        got = os.readv(pipe.fileno(), [missing])
        if not got:
            raise EOFError
        missing = missing[got:]
    return content


def _messages(pipe: Connection, process: int, most_seconds: float) -> Iterator[tuple[str, Any, list[bytearray]]]:
    """Messages as they arrive, until there is none any more.

    Raises:
        HangsError: none arrives, though the copy is there.
    """
    patience = Patience(process, most_seconds)
    while True:
        try:
            arrived = pipe.poll(LOOK_SECONDS)
            message = pipe.recv() if arrived else None
            buffers = [_array(pipe, size) for size in message[2]] if message else []
        except (EOFError, OSError, pickle.UnpicklingError):
            return
        if message is None:
            patience.check()
            continue
        yield message[0], message[1], buffers
        patience.heard()
