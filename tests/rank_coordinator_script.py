"""One of two processes that settle things over a group of their own (gloo, CPU). Run by test_watch_ranks.py."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

FOUND: dict[str, object] = {}
OUT = Path(sys.argv[1], f"{os.environ['RANK']}.json")


@atexit.register
def _written_last() -> None:
    """Registered before anything else, so called after everything else."""
    import torch.distributed as dist

    FOUND["groups at exit"] = len(dist.distributed_c10d._world.pg_map)
    OUT.write_text(json.dumps(FOUND))


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from vram_guard.watch.rank_coordinator import DataParallel, Verdict  # noqa: E402


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def main(how: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    ranks = DataParallel(model)
    FOUND["groups"] = groups()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
    ranks.average_gradients()
    FOUND["gradient"] = float(model.weight.grad.mean())  # type: ignore[union-attr]
    FOUND["verdict"] = int(ranks.agree(Verdict.OUT_OF_MEMORY if dist.get_rank() else Verdict.FINE))
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
