"""The end of torch.distributed's process groups, before the interpreter goes.

gloo's threads free the tensors of an operation after they have told its waiter that it is done. Such a tensor may
belong to Python, and a thread that asks for Python's lock once the interpreter goes is ended by it, in the middle of
C++ code: the process ends with SIGABRT after its work was done ("terminate called without an active exception",
PyTorch's issue 190489). ``destroy_process_group`` ends the threads only where nothing else refers to the group, and
device meshes and sharded parameters do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

#: The name that ProcessGroupGloo.cpp gives its threads (``runLoop``); torch 2.4 gives none. Linux keeps 15 characters.
THREAD_NAME = "pt_gloo_runloop"

#: Looks in a row at which all of the threads have to be asleep, and the seconds between two of them.
LOOKS, BETWEEN = 5, 0.002

#: Seconds after which a process ends although one of gloo's threads is still at work (its peer may be gone).
PATIENCE = 10.0
#: The same where no thread has gloo's name, so that it may be any thread that is at work.
PATIENCE_UNNAMED = 1.0

_TASKS = Path("/proc/self/task")


def end_process_groups() -> None:
    """End every process group of this process, and wait for their threads; nothing where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):  # the training is over, and its exit code stays its own
            distributed.destroy_process_group()
    wait_for_gloo()


def wait_for_gloo(patience: float = PATIENCE) -> bool:
    """Wait until gloo's threads in this process sleep, and so hold no tensor of an operation that is done.

    Args:
        patience: seconds to wait at most.

    Returns:
        False where they were still at work. True too where the system does not tell (it is no Linux).
    """
    asleep, began = 0, time.monotonic()
    while asleep < LOOKS:
        named, states = _states()
        if time.monotonic() - began > (patience if named else min(patience, PATIENCE_UNNAMED)):
            return False
        asleep = asleep + 1 if all(state == "S" for state in states) else 0
        time.sleep(BETWEEN)  # without Python's lock, which the threads may be waiting for
    return True


def _states() -> tuple[bool, list[str]]:
    """True and the states of gloo's threads (``proc(5)``); False and those of all threads but the main one."""
    found: list[tuple[str, str]] = []
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if task.name != str(os.getpid()):
                found.append((name, rest.split()[0]))
    named = [state for name, state in found if name == THREAD_NAME]
    return bool(named), named or [state for _, state in found]
