"""Copies of the process that hang: noticed by what they do not do, and ended where they stand."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from vram_guard.language import _
from vram_guard.limits import ABORT_SECONDS, IDLE_SECONDS


class HangsError(Exception):
    """The copy sends nothing and does nothing."""


class Patience:
    """Patience with a copy: it lasts while the copy, or one that it has made itself, works.

    Args:
        process: the copy's number.
        most_seconds: that it may take at all.
    """

    def __init__(self, process: int, most_seconds: float) -> None:
        self._process, self._most_seconds = process, most_seconds
        self._begun = self._busy = time.monotonic()
        self._worked = _processor_seconds(process)

    def heard(self) -> None:
        """The copy has sent something."""
        self._busy = time.monotonic()

    def check(self) -> None:
        """Called about every :data:`vram_guard.limits.LOOK_SECONDS` while nothing arrives.

        Raises:
            HangsError: patience is at its end.
        """
        now, used = time.monotonic(), _processor_seconds(self._process)
        if used is None or used != self._worked:
            self._busy, self._worked = now, used
        idle = now - self._busy
        if idle > IDLE_SECONDS or now - self._begun > self._most_seconds:
            raise HangsError(
                _(
                    "the copy of the process that looked at the training did not answer for {seconds} s (it may wait "
                    "for a lock that a thread of the original holds)",
                    seconds=f"{idle if idle > IDLE_SECONDS else self._most_seconds:.0f}",
                )
            )


def abort(process: int) -> None:
    """Let a copy that hangs, and those that it has made, write their stacks, the innermost first; then end them."""
    copies = [*made_by(process)][::-1]
    for copy in copies:
        _signal(copy, signal.SIGSTOP)  # none goes on because another one ended
    for copy in copies:
        _signal(copy, signal.SIGABRT)
        _signal(copy, signal.SIGCONT)
        _wait(copy)
        _signal(copy, signal.SIGKILL)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, number)


def _wait(copy: int) -> None:
    """Until a copy has ended; where the system does not say, there is no waiting."""
    until = time.monotonic() + ABORT_SECONDS
    while time.monotonic() < until and (_fields(copy) or "Z")[0] != "Z":
        time.sleep(0.02)


def made_by(process: int) -> Iterator[int]:
    """A copy and what it has started, in any of its threads, the outer ones first."""
    yield process
    children: list[str] = []
    for thread in Path(f"/proc/{process}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            children += (thread / "children").read_text(encoding="ascii").split()
    for child in children:
        yield from made_by(int(child))


def _processor_seconds(process: int) -> float | None:
    """Seconds of processor time of a copy and all that it has made; None where the system does not say."""
    total = 0
    for copy in made_by(process):
        fields = _fields(copy)
        if fields is not None:
            total += sum(int(field) for field in fields[11:15])
        elif copy == process:
            return None
    return total / os.sysconf("SC_CLK_TCK")


def _fields(process: int) -> list[str] | None:
    """What /proc says of a process, from its state on (proc(5)); None where there is nothing."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
