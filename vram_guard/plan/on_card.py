"""A step as it is written, traced for the card of a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY
from vram_guard.simulate import trace

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline


def traced_on_card(step: TrainingStep, budget: Budget | None, *, cudnn: str | None = None) -> Timeline:
    """The step's timeline on a budget's card.

    Args:
        step: as it is written.
        budget: whose card it runs on; None, or an amount alone: a card of the assumed compute capability.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.plan`.
    """
    if budget is None:
        return trace(step, compute_capability=ASSUMED_COMPUTE_CAPABILITY, cudnn=cudnn)
    return trace(
        step,
        compute_capability=budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY,
        multiprocessors=budget.multiprocessors,
        placement=budget.placement,
        cudnn=cudnn,
    )
