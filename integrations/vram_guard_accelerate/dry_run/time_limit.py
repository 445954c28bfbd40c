"""A limit on the time that a script may take, which says where the script stands when it is over."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def limit(seconds: float, late: Callable[[Any], object]) -> None:
    """Call ``late`` in so many seconds with the frame that runs then, unless :func:`no_limit` is called before.

    It should end the process: what it raises, an ``except:`` of the script may catch. Copies of this process do not
    inherit the limit.
    """
    signal.signal(signal.SIGALRM, lambda _number, frame: late(frame))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def processor_limit(seconds: float, late: Callable[[Any], object]) -> None:
    """The same in seconds of this process's processor time, so that the answer is not one of how busy a machine is."""
    signal.signal(signal.SIGPROF, lambda _number, frame: late(frame))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def no_limit() -> None:
    """Take as long as it takes."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
