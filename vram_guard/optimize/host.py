"""The processors that a training may use here."""

from __future__ import annotations

import math
import os
from pathlib import Path

#: A control group's limit, "max 100000" or "200000 100000" (Linux, Documentation/admin-guide/cgroup-v2.rst).
CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(limit: Path = CGROUP_LIMIT) -> int:
    """Processors that this process may run on: its affinity, and within it the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        cores = min(cores, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(1, cores)
