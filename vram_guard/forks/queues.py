"""Queues in a copy of a process: the threads that emptied them were not copied, and nobody may wait for them.

A logger that writes by a thread of its own (TensorBoard's) waits for its queue wherever it is flushed, and where the
queue is full.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from vram_guard.patching import replace_attributes

_join, _put = queue.Queue.join, queue.Queue.put


def wait_for_nobody() -> None:
    """From now on, in a process with one thread: full queues take nothing more, and count as worked off.

    Example:
        >>> wait_for_nobody()  # doctest: +SKIP
    """
    replace_attributes(queue.Queue, {"join": _joined, "put": _taken})


def _joined(self: Any) -> None:
    if threading.active_count() > 1:
        _join(self)


def _taken(self: Any, item: Any, block: bool = True, timeout: float | None = None) -> None:
    alone = threading.active_count() == 1 and block and timeout is None
    if alone and 0 < self.maxsize <= self.qsize():
        return  # it would be thrown away with the copy
    _put(self, item, block, timeout)
