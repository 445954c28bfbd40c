"""Host memory that this process may use (offloading keeps tensors there)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vram_guard.errors import DeviceQueryError
from vram_guard.language import _, marked
from vram_guard.units import written_bytes

PHYSICAL = marked("physical memory")


@dataclass(frozen=True)
class HostMemory:
    """Host RAM in bytes.

    Attributes:
        total: what this process may use at most: the machine's RAM, or the cgroup's limit where that is less.
        available: how much of it can be taken now without swapping.
        limited_by: what sets ``total``: "physical memory", or the cgroup file that holds the limit.
    """

    total: int
    available: int
    limited_by: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The host RAM this process may use, bounded by the limits of its control groups (versions 1 and 2).

    Containers and batch systems limit memory through cgroups while ``/proc/meminfo`` still shows the
    whole machine; the kernel kills the process that exceeds the limit, so the limit is what counts.

    Args:
        root: where ``proc`` and ``sys`` are looked up (tests give a directory of their own).

    Raises:
        DeviceQueryError: where the operating system tells neither.
    """
    memory = _physical_memory(root)
    for limit_file, limit, used in _cgroup_limits(root):
        available = min(memory.available, max(0, limit - used))
        # An equal limit binds nothing: the machine itself is named then.
        if limit < memory.total:
            memory = HostMemory(limit, available, str(limit_file))
        else:
            memory = HostMemory(memory.total, available, memory.limited_by)
    return memory


def host_share(host_budget: str | int | None, processes: int) -> int | None:
    """The share of a machine's memory that each of its processes may take, in bytes.

    Args:
        host_budget: of the machine: "64GiB" or bytes; None: what is free now.
        processes: on the machine, at least 1.

    Returns:
        None where the operating system does not report what is free.
    """
    if host_budget is not None:
        return written_bytes(host_budget) // processes
    try:
        return host_memory().available // processes
    except DeviceQueryError:
        return None


def _physical_memory(root: Path) -> HostMemory:
    fields = _key_values(root / "proc" / "meminfo")
    if "MemTotal:" in fields:
        total = fields["MemTotal:"] * 1024  # the kernel prints "kB" and means KiB (man 5 proc)
        available = fields.get("MemAvailable:", fields.get("MemFree:", 0)) * 1024
        return HostMemory(total, min(available, total), PHYSICAL)
    return _physical_memory_without_proc()


def _physical_memory_without_proc() -> HostMemory:
    """POSIX systems without /proc (macOS); the available amount is unknown there, so all of it counts."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise DeviceQueryError(
            _(
                "The operating system does not say how much memory this machine has (no /proc/meminfo, no sysconf): "
                "plan without offload."
            )
        ) from None
    return HostMemory(total, total, PHYSICAL)


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, limit, use that cannot be reclaimed) in bytes, for every group this process is in."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys" / "fs" / "cgroup"
        if hierarchy == "0" and not controllers:
            yield from _limits(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits(
                base / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits(
    base: Path, path: str, limit_name: str, used_name: str, reclaimable: str
) -> Iterator[tuple[Path, int, int]]:
    """The group at ``path`` and all groups above it: a parent's limit binds its children too."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    # Inside a container the path is the host's while the mount shows the container's own group as the
    # root, so the deeper directories may be missing; the root is read in any case.
    for depth in range(len(parts), -1, -1):
        group = base.joinpath(*parts[:depth])
        limit = _number(group / limit_name)
        if limit is None:
            continue
        used = _number(group / used_name) or 0
        # Page cache counts as used and is given back before anything is killed.
        used -= _key_values(group / "memory.stat").get(reclaimable, 0)
        yield group / limit_name, limit, max(0, used)


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for "max" (no limit), and where there is no such file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _key_values(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
