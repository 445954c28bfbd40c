"""Shared memory of a copied process, replaced by memory of its own with the same content, at the same addresses.

``multiprocessing.Value`` and ``Array``, tensors in shared memory and files that are mapped for writing are the same
memory in a copy as in its original, unlike all other memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vram_guard.limits import SHARED_MEMORY_COPIED

#: mmap(2), Linux: at exactly this address, in place of what is there; the address of a mapping that failed.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class _Area(NamedTuple):
    start: int
    length: int


def make_private() -> None:
    """From now on, what this process writes into shared memory reaches no other one (on Linux)."""
    if sys.platform != "linux":
        return
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    left = SHARED_MEMORY_COPIED
    for area in list(_writable_shared()):
        if area.length > left:
            continue
        left -= area.length
        try:
            # Past the end of a mapped file, reading it directly would be fatal.
            with Path("/proc/self/mem").open("rb", 0) as memory:
                memory.seek(area.start)
                content = memory.read(area.length)
        except (OSError, OverflowError):
            continue
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        made = map_memory(area.start, area.length, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        if made != _FAILED:
            ctypes.memmove(area.start, content, len(content))


def _writable_shared() -> Iterator[_Area]:
    """Areas backed by memory or by files; those of devices (a GPU's) are left alone."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, permissions, _offset, _device, _inode, *path = line.split(maxsplit=5)
            name = path[0].strip() if path else ""
            device = name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero"))  # noqa: S108 - as the system names it
            if permissions.startswith("rw") and permissions.endswith("s") and not device and "[" not in name:
                start, end = (int(address, 16) for address in addresses.split("-"))
                yield _Area(start, end - start)
