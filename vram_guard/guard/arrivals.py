"""Ranks that wait for each other without a collective, and not for ever.

Looking at a training takes one rank longer than another, and a copy that hangs is given up after minutes only. Ranks
that waited for it in a collective would be ended by their backend's timeout, which may be shorter (NCCL's ends the
process), or would wait for half an hour. So each rank first says in the store of the process group that it has arrived:
nothing of the backend waits then. The last one to arrive lets all of them go on together; one that has waited too long
says so, and then all, the late one too, know that nobody is to be waited for. Whoever writes first decides. A rank
whose process has ended is ended with the others by its launcher; where none does that, it is waited for as long.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

from vram_guard.errors import LostRankError
from vram_guard.language import _
from vram_guard.limits import IDLE_SECONDS, LOOK_AT_FIRST, LOOK_AT_MOST

#: Seconds that ranks may be apart in any case: the default timeout of NCCL's collectives (torch.distributed's
#: documentation of ``init_process_group``), which ends ranks that are farther apart without any guard.
APART_SECONDS = 600.0

_TOGETHER, _LATE = "together", "late"
_numbers = itertools.count()


def patience(own_seconds: float) -> float:
    """Seconds that a rank waits for others, which may have to give up a copy that hangs."""
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

    Raises:
        LostRankError: the process in which the store lies has ended.
    """
    number, store = next(_numbers), _store(world_size)
    if store is None:
        return True
    with _lost_store():
        return _decided(store, number, world_size, most_seconds) == _TOGETHER


def _decided(store: Any, number: int, world_size: int, most_seconds: float) -> str:
    arrived, decided = f"vram_guard/{number}/arrived", f"vram_guard/{number}/decided"
    if store.add(arrived, 1) == world_size:
        store.compare_set(decided, "", _TOGETHER)
    until, pause = time.monotonic() + most_seconds, LOOK_AT_FIRST
    while not store.check([decided]):
        if time.monotonic() > until:
            store.compare_set(decided, "", _LATE)
        else:
            time.sleep(pause)
            pause = min(2 * pause, LOOK_AT_MOST)
    return str(store.get(decided).decode())


@contextlib.contextmanager
def _lost_store() -> Iterator[None]:
    """The store lies in the process of rank 0, or in the launcher's: it ends with that."""
    import torch.distributed as dist

    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LostRankError(
            _(
                "the process through which the ranks talk (that of rank 0, or the launcher) ended while the training "
                "was planned. All ranks end"
            )
        ) from error


def _store(world_size: int) -> Any:
    """The store of the process group; None where there is none of so many ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        return None
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - see simulate/private_api.py
