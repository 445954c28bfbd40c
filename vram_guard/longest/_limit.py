"""A time limit on other people's code: what takes longer is interrupted where it stands."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

#: Seconds after which code that has caught the interruption is interrupted again.
_AGAIN = 0.2

#: Seconds of the shortest alarm: none at all would switch it off.
_LEAST = 1e-4


class TimeIsUpError(BaseException):
    """The limit is reached. No ``Exception``: code that goes on after every error must not go on after this one."""


class TimeLimit:
    """A point in time."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.told = False
        """True once :meth:`check` has raised: an alarm for the same point in time says nothing more."""

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._until - time.monotonic()

    def check(self) -> None:
        """Raise TimeIsUpError where it is past: for code that cannot be interrupted, between two parts of it."""
        if self.left <= 0:
            self.told = True
            raise TimeIsUpError


class at_most:  # noqa: N801 - reads as a statement
    """Leave the block when the time is up; what it has put into objects of its caller stays there.

    Args:
        seconds: where it is not positive, the block ends as soon as it begins.
        interrupt: by an alarm, where this thread may set one; False: only where the block checks the limit. An alarm
            that somebody else has set goes on.
    """

    def __init__(self, seconds: float, *, interrupt: bool = True) -> None:
        self._seconds = max(seconds, _LEAST)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._interrupts = interrupt and in_main_thread and hasattr(signal, "setitimer")
        self._inside = False
        self._handler: Any = None
        self._others = (0.0, 0.0)

    def __enter__(self) -> TimeLimit:
        limit = self._limit = TimeLimit(self._seconds)
        if self._interrupts:
            self._handler = signal.signal(signal.SIGALRM, self._ring)
            self._inside = True
            self._others = signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN)
        return limit

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> bool:
        self._inside = False
        if self._interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            if self._others[0]:
                spent = self._seconds - self._limit.left
                signal.setitimer(signal.ITIMER_REAL, max(self._others[0] - spent, _LEAST), self._others[1])
        return kind is not None and issubclass(kind, TimeIsUpError)

    def _ring(self, _number: int, _frame: Any) -> None:
        if self._inside and not self._limit.told:
            raise TimeIsUpError
