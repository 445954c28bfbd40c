"""Llama 3 of 8B, 70B and 405B on 8 to 512 GPUs: layouts as given, and as planned; peak, step time by the cost model."""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

from benchmarks.harness.workers import ask
from benchmarks.sharded.picture import CARD
from benchmarks.sharded.torchtitan import Recipe, flash_attention

NODE, LINK = 8, "nvlink,ib400"
LIMIT = 240.0
#: Seconds of wall-clock time for a plan: three times what 405B on 512 GPUs took beside other work.
PLAN_LIMIT = 1400.0


class Scale(NamedTuple):
    """One row: the model, how many GPUs, and how many of them divide each layer."""

    model: str
    gpus: int
    tensor: int = 1
    batch: int = 1

    @property
    def layout(self) -> str:
        """In words."""
        shards = self.gpus // self.tensor
        return f"FSDP2 {shards}" + (f" × TP {self.tensor}" if self.tensor > 1 else "")


SCALES = (
    Scale("8B", 8),
    Scale("8B", 64),
    Scale("8B", 512),
    Scale("70B", 32),
    Scale("70B", 64),
    Scale("70B", 64, 8),
    Scale("70B", 512, 8, 8),
    Scale("405B", 256, 8),
    Scale("405B", 512),
    Scale("405B", 512, 8, 2),
)


def every() -> list[dict[str, Any]]:
    """A row for each scale; an error in place of figures."""
    found = []
    for scale in SCALES:
        answer = ask(one, *scale, limit=LIMIT)
        figures = answer.result or {"error": answer.error.strip().splitlines()[-1]}
        found.append(
            {"model": scale.model, "gpus": scale.gpus, "layout": scale.layout, "batch": scale.batch, **figures}
        )
    return found


#: (model, GPUs) that ``plan`` spreads, one sequence on each GPU.
PLANNED = (
    ("8B", 8),
    ("8B", 16),
    ("8B", 64),
    ("70B", 32),
    ("70B", 64),
    ("70B", 128),
    ("70B", 512),
    ("405B", 128),
    ("405B", 256),
    ("405B", 512),
)


def planned() -> list[dict[str, Any]]:
    """The plan for each of :data:`PLANNED`; an error in place of figures."""
    found = []
    for model, gpus in PLANNED:
        answer = ask(plan_one, model, gpus, limit=PLAN_LIMIT)
        found.append({"model": model, "gpus": gpus, **(answer.result or {"error": answer.error.strip()[-200:]})})
    return found


def plan_one(model: str, gpus: int) -> dict[str, Any]:
    """In a worker: what ``plan`` takes of all its layouts and techniques for the step in mixed precision."""
    from vram_guard import plan
    from vram_guard.plan.layouts import layout_name

    step = Recipe(model, gpus, 1).step().with_(parallel=None, precision="bf16-mixed")
    start, used = time.perf_counter(), time.process_time()
    with flash_attention():
        made = plan(step, 1, gpu=CARD, gpus=gpus, node=NODE, link=LINK)
    assert made.spread is not None
    return {
        "layout": layout_name(made.spread.layout),
        "fits": made.fits,
        "checkpointed": len(made.recipe.checkpoint),
        "micro_batches": made.splits,
        "peak": made.estimate.peak_reserved,
        "step": made.spread.seconds,
        "exposed": made.spread.communication.exposed,
        "wall": time.perf_counter() - start,
        "processor": time.process_time() - used,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def one(model: str, gpus: int, tensor: int, batch: int) -> dict[str, Any]:
    """In a worker: the rank's peaks with both kinds of segments, the step's time by the cost model, seconds, host."""
    from vram_guard import AllocatorSettings
    from vram_guard.budget.catalogue import find_gpu
    from vram_guard.parallel.links import topology
    from vram_guard.plan.communication import communication
    from vram_guard.plan.step_time import step_seconds
    from vram_guard.simulate import trace_at

    card = find_gpu(CARD)
    recipe = Recipe(model, gpus, batch, tensor=tensor, checkpointing="full")
    start, used = time.perf_counter(), time.process_time()
    with flash_attention():
        timeline = trace_at(
            recipe.step(),
            batch,
            compute_capability=card.compute_capability,
            multiprocessors=card.multiprocessors,
            placement=card.placement,
        )
    traced, spent = time.perf_counter() - start, time.process_time() - used
    settings = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}
    peaks = {name: timeline.at(batch, settings=one).peak_reserved for name, one in settings.items()}
    wires = topology(LINK, gpus=gpus, node=NODE, gpu=card)
    waited = communication(timeline, batch, card, wires)
    return {
        **peaks,
        "traced": traced,
        "processor": spent,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step": (step_seconds(timeline, batch, card) + waited.step_time).seconds,
        "exposed": waited.exposed,
        "events": len(timeline.events),
    }
