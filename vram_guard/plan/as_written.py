"""The plan for a step that fits as it is written, from its timeline alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.plan._answer import batch_reasons
from vram_guard.plan._request import environment_settings
from vram_guard.plan.model import Plan
from vram_guard.plan.search_space import Candidate

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.timeline import Timeline


def plan_as_written(timeline: Timeline, batch_size: int, budget: Budget) -> Plan | None:
    """The plan that changes nothing; None where the step does not fit, so that others have to be traced.

    Args:
        timeline: of the step on one GPU, on the budget's card, where a micro-batch is a loaded batch.
        batch_size: samples that the loader delivers at once.
        budget: of the card.

    Example:
        >>> from vram_guard import Budget, TrainingStep, trace
        >>> import torch
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> plan_as_written(trace(step), 1000, Budget.of("80MiB"))
        <Plan that fits: 32-true, 1 x 1000 samples; 24.00 MiB of 79.04 MiB>
    """
    found = Candidate(timeline, timeline.at(batch_size, settings=environment_settings()))
    if not found.estimate.fits(budget):
        return None
    return Plan(
        precision=timeline.precision,
        micro_batch_size=batch_size,
        accumulate=1,
        batch_size=batch_size,
        effective_batch_size=batch_size,
        precision_before=timeline.precision,
        accumulate_before=1,
        batch_size_before=batch_size,
        effective_batch_size_before=batch_size,
        learning_rate_factor=1.0,
        fits=True,
        estimate=found.estimate,
        before=found.estimate,
        budget=budget.for_tier(found.estimate.tier, found.estimate.network),
        reason_values=batch_reasons(found),
        rejected=(),
        slowdown=1.0,
        timeline=timeline,
        timeline_before=timeline,
    )
