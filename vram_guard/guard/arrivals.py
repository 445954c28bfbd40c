"""Ranks that wait for each other without a collective, and not for ever.

Looking at a training takes one rank longer than another, and a copy that hangs is given up after minutes only. Ranks
that waited for it in a collective would be ended by their backend's timeout, which may be shorter (NCCL's ends the
process), or would wait for half an hour. So each rank first says in the store of the process group that it has arrived:
nothing of the backend waits then. The last one to arrive lets all of them go on together; one that has waited too long
says so, and then all, the late one too, know that nobody is to be waited for. Whoever writes first decides.
"""

from __future__ import annotations

import itertools
import time

from vram_guard.forks.hanging import IDLE_SECONDS
from vram_guard.language import _

#: Seconds that ranks may be apart in any case: the default timeout of NCCL's collectives (torch.distributed's
#: documentation of ``init_process_group``), which ends ranks that are farther apart without any guard.
APART_SECONDS = 600.0
#: Seconds between two looks at the store, at first and at most.
_SOON, _LATER = 0.005, 0.5

_TOGETHER, _LATE = "together", "late"
_numbers = itertools.count()


def patience(own_seconds: float) -> float:
    """Seconds that a rank waits for others which do the same work, and may have to give up a copy that hangs."""
    return max(APART_SECONDS, 2 * (own_seconds + IDLE_SECONDS))


def late() -> str:
    """The words for a rank that was not waited for any longer."""
    return _("a rank did not say what it has planned in the time that others wait for it")


def all_arrive(world_size: int, most_seconds: float) -> bool:
    """Wait for the other ranks; every rank calls it at the same points, and every rank gets the same answer.

    Args:
        world_size: number of ranks.
        most_seconds: that this rank waits.

    Returns:
        False where a rank did not arrive in time: there must be no collective until that has been dealt with. True also
        where there is no store to ask, as ranks that talk by other means than torch.distributed have none.
    """
    import torch.distributed as dist

    number = next(_numbers)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        return True
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - see simulate/private_api.py
    arrived, decided = f"vram_guard/{number}/arrived", f"vram_guard/{number}/decided"
    if store.add(arrived, 1) == world_size:
        store.compare_set(decided, "", _TOGETHER)
    until, pause = time.monotonic() + most_seconds, _SOON
    while not store.check([decided]):
        if time.monotonic() > until:
            store.compare_set(decided, "", _LATE)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LATER)
    return bool(store.get(decided) == _TOGETHER.encode())
