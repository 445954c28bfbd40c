"""Signals that end a command; one that is ignored where it is started (nohup, a job in the background) stays so."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: Signals that end a command.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))

#: Exit code of a command that a signal ended: this and the signal's number, as shells have it.
EXIT_BASE = 128


def ignored() -> list[signal.Signals]:
    """The signals of :data:`ENDING` that the starting process has switched off."""
    return [number for number in ENDING if signal.getsignal(number) == signal.SIG_IGN]


@contextlib.contextmanager
def handled(
    handler: Callable[[int, Any], None], numbers: Iterable[int] = ENDING, *, even_ignored: bool = False
) -> Iterator[None]:
    """Inside the block, a handler for signals that are not ignored; in the main thread only, as Python has it.

    Args:
        handler: is given the signal's number and the frame.
        numbers: of the signals.
        even_ignored: also for those that are ignored, as shells have it for programs that they start in the background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = set(numbers) - (set() if even_ignored else set(ignored()))
    before = {number: signal.signal(number, handler) for number in own}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def exit_code(code: int) -> int:
    """The exit code for a process's, which is negative where a signal ended it."""
    return code if code >= 0 else EXIT_BASE - code
