"""A rank of two under DistributedDataParallel, whose checkpointed block differs on the second one alone."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vram_guard.errors import RecomputationError
from vram_guard.techniques import Recipe, install


def main(rank: int, store: str) -> int:
    """Train for three steps; 3 where a block differed, 0 where none did."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    install(model, Recipe(checkpoint=("0",)))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(3):
        batch = torch.ones(2, 4)
        loss = replica(batch).sum()
        if rank == 1:
            batch.data.mul_(2)
        loss.backward()
        try:
            optimizer.step()
        except RecomputationError:
            return 3
        optimizer.zero_grad()
    return 0


if __name__ == "__main__":
    # Not by the interpreter's own end: threads of gloo that wait for the other rank may abort the process there.
    os._exit(main(int(sys.argv[1]), sys.argv[2]))
