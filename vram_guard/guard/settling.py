"""The loop of a decision: plans are made until one is known to leave what is learned as it was.

Of a framework's training as of a script's: how either is followed, and what is proven of it, is its own business
(:class:`PlannedTraining`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.refusals import Refusal
from vram_guard.language import _
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.descriptions import refused as refused_reason
from vram_guard.plan.techniques import TECHNIQUES
from vram_guard.proof.prove import Disproof, Proof

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.guard.settings import PlanSettings
    from vram_guard.plan import Plan
    from vram_guard.plan.source import Source
    from vram_guard.step import TrainingStep


class PlannedTraining(Protocol):
    """A training that is decided for."""

    def plan(self, refused: Mapping[str, str]) -> Plan:
        """The cheapest plan that fits, without these techniques (technique -> why)."""

    def objections(self, plan: Plan) -> Iterable[Refusal | None]:
        """Techniques of the plan that only its traces have shown to be impossible."""

    def finds_body(self, refused: dict[str, str]) -> bool:
        """Look for the module that may run over slices of a batch; True if it is found now, for the plans that follow.

        Where there is none, slices are refused.
        """

    def prove(self, plan: Plan, refused: dict[str, str]) -> Proof | Disproof:
        """Proof of a plan that changes something; what it rests on may be refused on the way."""


def settled(training: PlannedTraining, refused: dict[str, str]) -> tuple[Plan, Proof]:
    """The best plan that is known to leave what is learned as it was, and how that is known.

    Args:
        training: that is decided for.
        refused: technique -> why it is not possible; techniques that are not are added on the way.

    Raises:
        UnsupportedStepError: no technique is left.
    """
    unproven = dict[str, str]()
    fitting: Plan | None = None
    for _technique in range(len(TECHNIQUES) + 1):
        made = training.plan(refused)
        objections = training.objections(made)
        new = {one.technique: one.reason for one in objections if one is not None and one.technique not in refused}
        if new:
            refused.update(new)
            continue
        if not made.fits and "slices" not in refused and training.finds_body(refused):
            continue
        if fitting is not None and not made.fits:
            others = {name: why for name, why in refused.items() if name != "accumulate"}
            if {name: why for name, why in others.items() if name != "slices"} != unproven:
                fitting = training.plan(others)
            return (made.proposing(fitting, refused["accumulate"]) if fitting.fits else made), Proof("")
        if not made.fits and "slices" in refused:
            made = replace(made, reason_values=(*made.reason_values, refused_reason("slices", refused["slices"])))
        if not made.fits or not made.changed:
            return made, Proof("")
        proof = training.prove(made, refused)
        if isinstance(proof, Proof):
            return made, proof
        if proof.technique == "accumulate" and "accumulate" not in refused:
            fitting, unproven = made, dict(refused)
        refused[proof.technique] = proof.reason
    raise UnsupportedStepError(_("no technique is left: {reasons}", reasons="; ".join(refused.values())))


def planned(what: TrainingStep | Source, size: int, budget: Budget, settings: PlanSettings, **options: Any) -> Plan:
    """The cheapest plan that fits, by the settings of a guard.

    Args:
        what: the step.
        size: of its batch.
        budget: to fit into.
        settings: of the guard.
        **options: of :class:`~vram_guard.plan.PlanOptions`, what the settings do not say; of
            :func:`~vram_guard.plan.plan` ``allow``, ``pin``, ``grow`` and ``progress``.
    """
    from vram_guard.plan import PlanOptions, plan

    beside = {name: options.pop(name) for name in ("allow", "pin", "grow", "progress") if name in options}
    given = {"host_budget": settings.host_budget, **options}
    made = plan(
        what,
        size,
        budget,
        options=PlanOptions(target_utilization=settings.target_utilization, lr_rule=settings.lr_rule, **given),
        **{"allow": settings.techniques, "grow": settings.grow, **beside},
    )
    if settings.whole_job:
        return made
    return replace(made, reason_values=(*made.reason_values, Reason(Why.JOB_LEFT_OUT)))
