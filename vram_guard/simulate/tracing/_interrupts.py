"""Ctrl-C during a trace: held back until an operator begins, so that nothing is left half restored."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """True if the user pressed Ctrl-C while it was held back."""

    def __init__(self) -> None:
        self.pending = False

    def deliver(self) -> None:
        """Raise what was held back, at a point from which everything is restored.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[Interrupts]:
    """Inside the block SIGINT waits for :meth:`Interrupts.deliver`, or for the end of the block.

    Pressed twice, it is raised at once. Only Python's main thread receives signals: elsewhere nothing changes, nor
    where other code handles SIGINT in C or ignores it.
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield interrupts
        return

    def hold(_number: int, _frame: FrameType | None) -> None:
        if interrupts.pending:
            interrupts.deliver()
        interrupts.pending = True

    handler: Any = before
    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts.pending:
            interrupts.pending = False
            handler(signal.SIGINT, None)
