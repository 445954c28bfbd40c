"""One of two processes that settle things over a group of their own (gloo, CPU). Run by test_watch_ranks.py."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

FOUND: dict[str, object] = {}
OUT = Path(sys.argv[1], f"{os.environ['RANK']}.json")


@atexit.register
def _written_last() -> None:
    """Registered before anything else, so called after everything else."""
    import torch.distributed as dist

    FOUND["groups at exit"] = len(dist.distributed_c10d._world.pg_map)
    OUT.write_text(json.dumps(FOUND))


import torch.distributed as dist  # noqa: E402

from vram_guard.guard import arrivals, ranks  # noqa: E402
from vram_guard.watch.rank_coordinator import RankCoordinator  # noqa: E402


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


class Talking:
    """The ranks as a framework lets them talk."""

    rank = property(lambda _self: dist.get_rank())
    world_size = property(lambda _self: dist.get_world_size())

    def broadcast(self, value: Any, source: int) -> Any:
        held = [value]
        dist.broadcast_object_list(held, src=source)
        return held[0]


def late_rank() -> None:
    """The second rank comes back from its work only when the first one has given it up."""
    store = dist.distributed_c10d._get_default_store()
    arrivals.APART_SECONDS = arrivals.IDLE_SECONDS = 0.2
    FOUND["together"] = ranks.attempt(Talking(), dist.get_rank).value

    def work() -> int:
        if dist.get_rank():
            store.wait(["vram_guard/1/decided"], timedelta(seconds=60))
        return 1

    outcome = ranks.attempt(Talking(), work)
    assert outcome.failure is not None
    FOUND["late"] = [outcome.failure.kind, outcome.failure.unsupported]


def killed_rank(rank: int) -> None:
    """One is killed at its work when the other one waits for it."""
    store = dist.distributed_c10d._get_default_store()

    def work() -> None:
        if dist.get_rank() == rank:
            store.wait(["vram_guard/0/arrived"], timedelta(seconds=60))
            os.kill(os.getpid(), signal.SIGKILL)

    ranks.attempt(Talking(), work)


def main(how: str) -> None:
    dist.init_process_group("gloo")
    if how.startswith("killed"):
        killed_rank(int(how.split()[1]))
    if how == "closed":
        late_rank()
    ranks = RankCoordinator()
    FOUND["groups"] = groups()
    FOUND["parts"] = ranks.parts(dist.get_rank() + 1, dist.get_rank() + 5)
    if how == "closed":
        ranks.close()
        ranks.close()
    elif how == "dropped":
        del ranks
    elif how == "destroyed":  # by the script, all groups at once
        dist.destroy_process_group()
    FOUND["groups after"] = groups()


if __name__ == "__main__":
    main(sys.argv[2])
