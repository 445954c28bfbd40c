"""A time limit on other people's code: what takes longer is interrupted where it stands."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
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

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._until - time.monotonic()

    def check(self) -> None:
        """Raise TimeIsUpError where it is past: for code that cannot be interrupted, between two parts of it."""
        if self.left <= 0:
            raise TimeIsUpError


@contextlib.contextmanager
def at_most(seconds: float, *, interrupt: bool = True) -> Iterator[TimeLimit]:
    """Leave the block when the time is up; what it has put into objects of its caller stays there.

    Args:
        seconds: where it is not positive, the block ends as soon as it begins.
        interrupt: by an alarm, where this thread may set one; False: only where the block checks the limit. An alarm
            that somebody else has set goes on.
    """
    seconds = max(seconds, _LEAST)
    limit = TimeLimit(seconds)
    on = interrupt and hasattr(signal, "setitimer")
    on = on and threading.current_thread() is threading.main_thread()

    def ring(_number: int, _frame: Any) -> None:
        if on:
            raise TimeIsUpError

    handler = signal.signal(signal.SIGALRM, ring) if on else None
    others = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN) if on else (0.0, 0.0)
    try:
        yield limit
    except TimeIsUpError:
        pass
    finally:
        was_on, on = on, False
        if was_on:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if others[0]:
                spent = seconds - limit.left
                signal.setitimer(signal.ITIMER_REAL, max(others[0] - spent, 1e-3), others[1])
