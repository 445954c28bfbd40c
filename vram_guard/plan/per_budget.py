"""The plans of one training for several budgets, from the same few traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from vram_guard.budget import GPU, Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan import plan
from vram_guard.plan._depth import by_depth
from vram_guard.plan._option import Option
from vram_guard.plan._purity import watched_modules
from vram_guard.plan.model import Plan
from vram_guard.plan.pins import Pins
from vram_guard.plan.source import Source, source_of
from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY, DEFAULT_ALLOW
from vram_guard.step import TrainingStep


class PlanOfBudget(NamedTuple):
    """The plan for one budget."""

    name: str
    """The budget as it was given: a card, or an amount."""
    plan: Plan

    @property
    def words(self) -> str:
        """What differs from the step as written, behind the modelled time of a step in its times."""
        made = self.plan
        if not made.fits or not made.changed:
            return _("as written") if made.fits else _("nothing fits")
        option = Option(made.precision, made.splits, made.recipe).words(made.batch_size, made.precision_before)
        return option if made.slowdown is None else _("{name}: {words}", name=f"x {made.slowdown:.2f}", words=option)


def plans_per_budget(
    step: TrainingStep | Source,
    batch_size: int,
    budgets: Iterable[str | int],
    *,
    gpu: GPU | str | None = None,
    allow: Iterable[str] = DEFAULT_ALLOW,
    host_budget: str | int | None = None,
    cudnn: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[PlanOfBudget]:
    """The plan for each budget, the smallest first; most budgets take no trace of their own.

    Only the amounts differ: kernels, precisions and step times are those of one GPU, also where a budget is the memory
    of another. Plans are composed of the traces and not traced themselves; :func:`vram_guard.plan.plan` for the budget
    that is chosen does so.

    Args:
        step: the training step as written.
        batch_size: samples that the loader delivers at once.
        budgets: amounts, or cards, of which the memory counts.
        gpu: whose kernels and speed count; None: those that are assumed without a card.
        allow: what may be changed, as in :func:`vram_guard.plan.plan`.
        host_budget: host memory that techniques may take.
        cudnn: the cuDNN that is asked for the workspaces of convolutions.
        progress: called with a line of text before each slow part.

    Raises:
        InvalidInputError: no budgets, one that is none, or a training that is spread over several GPUs.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> for name, made in plans_per_budget(step, 30000, ["80MiB", "1GiB"], allow=["accumulate"]):
        ...     print(name, made.splits)
        80MiB 2
        1GiB 1
    """
    from vram_guard.budget import Budget
    from vram_guard.budget.catalogue import find_gpu
    from vram_guard.plan._of_source import forget_explored

    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    amounts = [(str(each), _with_kernels(Budget.of(Budget.of(each).available), card)) for each in budgets]
    if not amounts:
        raise InvalidInputError(_("a batch-size curve needs at least one GPU or budget"))
    allow = tuple(allow)
    shared = step if isinstance(step, Source) else _source(step, amounts[0][1])
    shared = replace(shared, explored={}, thorough=False)
    try:
        found = [
            PlanOfBudget(
                name,
                plan(shared, batch_size, amount, allow=allow, host_budget=host_budget, cudnn=cudnn, progress=progress),
            )
            for name, amount in amounts
        ]
    finally:
        forget_explored(shared)
    return sorted(found, key=lambda one: one.plan.budget.usable)


def _with_kernels(budget: Budget, card: GPU | None) -> Budget:
    """The amount, whether or not the card has so much, with the card's kernels and speed."""
    return budget if card is None else replace(budget, gpu=card, compute_capability=card.compute_capability)


def _source(step: TrainingStep, budget: Budget) -> Source:
    if step.parallel is not None:
        raise InvalidInputError(_("plans for several budgets are of trainings on one GPU"))
    capability = budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY
    return by_depth(source_of(step, capability, watched_modules(None, Pins())))
