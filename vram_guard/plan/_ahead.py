"""Traces that are made ahead, each in a copy of the process, while this one makes another."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vram_guard.limits import COPY_WORTH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from vram_guard.forks.fork import Copy
    from vram_guard.timeline import Timeline


class Ahead:
    """Traces in copies.

    Args:
        may_copy: whether the process may be copied for a trace.
    """

    def __init__(self, *, may_copy: bool) -> None:
        self._may_copy = may_copy and _processors() > 1
        self._copies: dict[Hashable, Copy[Timeline]] = {}
        self._last = 0.0
        """Processor seconds of the last trace that was made here."""

    def begin(self, key: Hashable, trace: Callable[[], Timeline]) -> None:
        """Make a trace in a copy, where that helps: traces take long, and no other copy is at work."""
        if not self._may_copy or self._copies or self._last < COPY_WORTH_SECONDS:
            return
        from vram_guard.forks.fork import ForkRefusedError, begin_in_fork

        try:
            self._copies[key] = begin_in_fork(lambda _progress: trace())
        except ForkRefusedError:
            self._may_copy = False

    def made(self, key: Hashable, trace: Callable[[], Timeline]) -> Timeline:
        """The trace that was begun under this key; without one, or where its copy failed, it is made here."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            try:
                return copy.answer()
            except Exception:  # noqa: BLE001 - whatever happened there happens here again, with its own traceback
                self._may_copy = False
        began = time.process_time()
        made = trace()
        self._last = time.process_time() - began
        return made

    def end(self) -> None:
        """End what has been begun and is not needed."""
        while self._copies:
            self._copies.popitem()[1].end()


def _processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
