"""What is said and known of one layout: its samples, the time of a step, why it was not taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import Message, _
from vram_guard.parallel.links import topology
from vram_guard.parallel.outside import outside_allocator
from vram_guard.plan.communication import communication
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.step_time import card_of, step_seconds
from vram_guard.units import Amount, format_bytes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.parallel.links import Topology
    from vram_guard.parallel.spec import Parallel
    from vram_guard.plan.model import Plan
    from vram_guard.plan.source import TraceRequest
    from vram_guard.timeline import Timeline


def less_nccl(budget: Budget, layout: Parallel | None, links: Topology | None) -> Budget:
    """A card's budget without what NCCL takes of it; an amount that PyTorch may reserve stays.

    Args:
        budget: of one GPU.
        layout: over several; None: there is one GPU alone.
        links: between them.
    """
    if layout is None or links is None or budget.source == "explicit":
        return budget
    taken = outside_allocator(layout, links)
    if not taken.high:
        return budget
    note = _("less {amount} for NCCL (estimate)", amount=format_bytes(taken.high))
    return replace(budget, available=max(0, budget.available - taken.high), notes=(*budget.notes, note))


def budget_of_rank(budget: Budget, layout: Parallel | None, link: str | Topology | None = None) -> Budget:
    """What one process of a layout may use of its card: without what NCCL takes, unless it has taken that already.

    Args:
        budget: of one GPU.
        layout: over several; None: there is one GPU alone.
        link: between them, as a user names it; None: assumed from the card.
    """
    taken = budget.free is not None and _processes_talk()
    return budget if taken else less_nccl(budget, layout, links_of(layout, budget, link))


def links_of(layout: Parallel | None, budget: Budget, link: str | Topology | None = None) -> Topology | None:
    """The links between a layout's GPUs; None where there is one GPU alone. The arguments as above."""
    if layout is None:
        return None
    return topology(link, gpus=layout.gpus, node=layout.gpus_of_a_node, gpu=budget.gpu)


def _processes_talk() -> bool:
    """True in a process of a group: frameworks talk before they train, so its communicator has its memory by now."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shares(gpus: int, layout: Parallel | None, total: int) -> int:
    """Samples that a rank loads at once, of ``total`` over all GPUs; 0 where they do not divide."""
    tensor = 1 if layout is None else layout.tensor
    share, rest = divmod(total * tensor, gpus)
    return 0 if rest else share


def trial_order(layout: Parallel | None) -> tuple[bool, bool, bool]:
    """FSDP2 first: it fits where most others do not, and tells how large the optimizer states are."""
    if layout is None:
        return False, False, False
    plain = layout.kind == "fsdp2" and layout.reshard is True and layout.tensor == 1
    return layout.offload, layout.tensor > 1, not (plain and not layout.offload)


def remembered(trace: Callable[[TraceRequest], Timeline]) -> Callable[[TraceRequest], Timeline]:
    """The same, each request traced once."""
    known: dict[TraceRequest, Timeline] = {}

    def remembered(request: TraceRequest) -> Timeline:
        if request not in known:
            known[request] = trace(request)
        return known[request]

    return remembered


def seconds_of(timeline: Timeline, size: int, budget: Budget, wires: Topology, micro_batches: int) -> float | None:
    """One optimizer step on every GPU; None where the timeline says nothing of its work."""
    try:
        time = step_seconds(timeline, size, budget.gpu, micro_batches=micro_batches)
    except InvalidInputError:
        return None
    card = card_of(budget.gpu, timeline.compute_capability)
    waited = communication(timeline, size, card, wires, micro_batches=micro_batches)
    return (time + waited.step_time).seconds


def divides_layers(timeline: Timeline) -> bool:
    """True if tensor parallelism does something: the ranks that share a layer talk to each other."""
    return any(one.dimension == "tensor" for one in timeline.collectives)


def failure(error: Exception) -> Message | str:
    """The reason why a layout is left out that failed."""
    if isinstance(error, VramGuardError):
        return str(error)
    return Reason(Why.FAILS, error=f"{type(error).__name__}: {error}")


def spread_reason(reason: Reason) -> Reason:
    """The same reason where "as written" means: spread in the way that was chosen."""
    return Reason(Why.SHORTAGE_SPREAD, **dict(reason.values)) if reason.kind is Why.SHORTAGE else reason


def why_not(plan: Plan) -> Reason:
    """The reason why nothing fits under a layout."""
    missing = plan.nearest_miss
    over = min(
        (amount for amount in (plan.peak - plan.budget.usable, missing.missing if missing else 0) if amount > 0),
        default=0,
    )
    if over:
        return Reason(Why.NOTHING_FITS, missing=Amount(over))
    return Reason(Why.LOWER_BOUND, peak=Amount(plan.peak))
