"""Step time of a launch as written, with what one process waits for the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vram_guard.parallel.links import topology
from vram_guard.parallel.spec import Kind, Parallel
from vram_guard.plan.communication import communication
from vram_guard.plan.step_time import card_of, seconds_as_written

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.first_batch import FirstBatch


def launch_seconds(made: Plan, first: FirstBatch) -> float:
    """The modelled seconds of an optimizer step; the links of the machine are those that its card usually has.

    Args:
        made: a plan for the launch.
        first: the script that is launched so.
    """
    timeline, shape, card = made.timeline_before, first.shape, made.budget.gpu
    computing = seconds_as_written(made)
    if timeline is None or shape.ranks == 1:
        return computing
    kind: Kind = "ddp" if first.fsdp_plugin is None else "fsdp2" if first.fsdp_plugin.fsdp_version == 2 else "fsdp1"
    node = shape.ranks if shape.ranks % shape.local_ranks else shape.local_ranks
    layout = first.engine or Parallel(gpus=shape.ranks, node=node, kind=kind)
    links = topology(None, gpus=shape.ranks, node=node, gpu=card)
    card = card_of(card, timeline.compute_capability)
    size, rounds = made.batch_size_before, made.accumulate_before
    waiting = communication(replace(timeline, parallel=layout), size, card, links, micro_batches=rounds)
    return computing + waiting.exposed
