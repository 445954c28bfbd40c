"""A disk on which a process can write in some folders only, where it has no overlay (Landlock, Linux 5.13 and later).

What it, or a program that it starts, tries to write elsewhere fails as on a disk that is read-only.

The numbers are those of ``linux/landlock.h`` and of the system calls that are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVILEGES = 38
_VERSION, _PATH_BENEATH = 1, 1

#: WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM.
_WRITING = 1 << 1 | sum(1 << bit for bit in range(4, 13))

#: Version of the interface -> rights that it has beside: REFER (a file moves or is linked elsewhere), TRUNCATE.
_LATER = {2: 1 << 13, 3: 1 << 14}

#: Those that a rule for a file may have, which is no folder.
_OF_FILES = 1 << 1 | 1 << 14


@cache
def rights() -> int:
    """The rights to write that this system can take away; 0 where it can take none."""
    if sys.platform != "linux":
        return 0
    version = _call(_CREATE_RULESET, None, 0, _VERSION)
    return _WRITING | sum(right for since, right in _LATER.items() if version >= since) if version > 0 else 0


def restrict(allowed: Iterable[Path]) -> None:
    """Take the right to write from this process, which has one thread, and from the programs that it starts.

    Args:
        allowed: folders and devices that may be written to; those that are not there are left out.

    Raises:
        OSError: the system does not let it.
    """
    taken = rights()
    attributes = struct.pack("=Q", taken)
    rules = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    if not taken or rules < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    try:
        for path in allowed:
            _allow(rules, path, taken)
        if _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or _call(_RESTRICT_SELF, rules, 0):
            raise OSError(ctypes.get_errno(), "landlock")
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, taken: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        given = taken if stat.S_ISDIR(os.fstat(beneath).st_mode) else taken & _OF_FILES
        _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", given, beneath), 0)
    finally:
        os.close(beneath)


def _call(number: int, *arguments: Any) -> int:
    found: int = _libc().syscall(number, *arguments)
    return found


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
