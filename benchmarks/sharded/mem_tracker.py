"""torch's FSDPMemTracker and our trace on the same small step, each in a process of its own."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from benchmarks.harness.workers import ask
from benchmarks.sharded.llama import SIZES, Llama, Sizes
from benchmarks.sharded.torchtitan import Recipe, flash_attention
from vram_guard.simulate import trace_at

#: Six layers, 865 million parameters: what FSDPMemTracker does in seconds.
SMALL = "small"
SIZES[SMALL] = Sizes(width=2048, layers=6, heads=16, multiple_of=256)
RECIPES = {
    "no recomputation": Recipe(SMALL, 8, 2, 2048, "none", optimizer="fused"),
    "full recomputation": Recipe(SMALL, 8, 2, 2048, "full", optimizer="fused"),
}
LIMIT = 600.0


def both() -> list[dict[str, Any]]:
    """A row for each recipe: allocated bytes, seconds and host memory of the two; an error in place of figures."""
    return [
        {
            "name": name,
            **{
                tool: answer.result or {"error": answer.error.strip().splitlines()[-1]}
                for tool, answer in (
                    ("ours", ask(ours, name, limit=LIMIT)),
                    ("tracker", ask(tracked, name, limit=LIMIT)),
                )
            },
        }
        for name in RECIPES
    ]


def _measured(peak: int, start: float) -> dict[str, Any]:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": peak, "seconds": time.perf_counter() - start, "host": kib * 1024}


def ours(name: str) -> dict[str, Any]:
    """In a worker: our trace."""
    recipe = RECIPES[name]
    step = recipe.step()
    start = time.perf_counter()
    with flash_attention():
        timeline = trace_at(step, recipe.batch, compute_capability=(9, 0))
    return _measured(timeline.at(recipe.batch).peak_allocated, start)


def tracked(name: str) -> dict[str, Any]:
    """In a worker: the tracker, as its docstring says, over fake tensors of the CPU; it wants a GPU for others."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    recipe = RECIPES[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=recipe.gpus)  # type: ignore[no-untyped-call]
    mesh = init_device_mesh("cpu", (recipe.gpus,))
    start = time.perf_counter()
    with FakeTensorMode():
        model = Llama(SIZES[recipe.model], recipe.length, recipe.norm)
        recipe.apply(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)  # the others ask for values
        batch = tuple(torch.zeros(recipe.batch, recipe.length, dtype=torch.long) for _ in range(2))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            for _ in range(2):
                recipe.loss_of(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    peak = sum(int(device["Total"]) for device in tracker.get_tracker_snapshot("peak").values())
    return _measured(peak, start)
