"""Ranks of one node look whether the others' processes still run.

A process that is killed says nothing. Where no launcher ends the others (``torchrun`` and ``accelerate launch`` do so),
they would wait for it until their patience ends. So each rank writes down which process it is, in the store of the
process group, before it begins to plan. Whoever waits looks up the processes of its own node: those of other nodes
cannot be seen from here, but a rank beside them sees them, and its verdict is everybody's.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from vram_guard.watch.running import started


class Companions:
    """The processes of the ranks on this node, as far as they have said which they are.

    Args:
        store: of the process group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._prefix = f"vram_guard/processes/{_node()}"
        self._seen: dict[int, tuple[int, str]] = {}
        """Rank -> its process and when that has started."""
        self._read = 0

    def announce(self, rank: int) -> None:
        """Say that this process is this rank."""
        number = self._store.add(f"{self._prefix}/count", 1)
        self._store.set(f"{self._prefix}/{number}", f"{rank} {os.getpid()} {started(os.getpid())}")

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        for number in range(self._read + 1, self._store.add(f"{self._prefix}/count", 0) + 1):
            key = f"{self._prefix}/{number}"
            if not self._store.check([key]):  # counted, and not written yet
                break
            rank, pid, start = self._store.get(key).decode().split(" ")
            self._seen[int(rank)], self._read = (int(pid), start), number
        return sorted(rank for rank, (pid, start) in self._seen.items() if started(pid) not in (start, "alive"))


def _node() -> str:
    """Where process ids mean the same: a host, and on it a namespace (``man 7 pid_namespaces``)."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} " + str(
            Path("/proc/self/ns/pid").readlink()
        )
    except OSError:
        return socket.gethostname()
