"""Acceptance of a plan whose step is the script's own: by what holds for every value, or by the user's word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.techniques import FORMS
from vram_guard.proof.effects import compared_while_training, unless_said
from vram_guard_accelerate._settings import LOSS_WEIGHT

if TYPE_CHECKING:
    from vram_guard.proof.small_steps import SmallSteps
    from vram_guard.techniques.recipe import Recipe
    from vram_guard_accelerate._launch_plan import LaunchPlan
    from vram_guard_accelerate._settings import LaunchSettings


@dataclass(frozen=True)
class PlanVerdict:
    """What is known about a plan."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Technique -> why it would be another training; the plan is not to be used then."""
    notes: tuple[str, ...] = ()
    """The way in which it was proven, for a reader of the plan."""


class Judge:
    """Judges the plans of one script.

    Args:
        settings: what the user said.
        why_not_by_graph: the reason why the loss graph does not prove slices; "" where it does.
        remarks_by_graph: what it does not show.
        small_steps: see :mod:`vram_guard.proof.small_steps`.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        why_not_by_graph: Callable[[], str],
        remarks_by_graph: Callable[[], tuple[str, ...]],
        small_steps: Callable[[Recipe], SmallSteps | None],
    ) -> None:
        self._settings = settings
        self._why_not_by_graph = why_not_by_graph
        self._remarks_by_graph = remarks_by_graph
        self._small_steps = small_steps

    def of(self, plan: LaunchPlan) -> PlanVerdict:
        """Whether this plan may be used. Techniques that leave every number as it is are not looked at.

        Args:
            plan: for the script.
        """
        steps = self._small_steps(plan.recipe)
        if steps is not None and steps.refutation:
            return PlanVerdict({FORMS[plan.recipe.optimizer]: steps.refutation})
        notes = () if steps is None else (steps.words(),)
        if plan.recipe.checkpoint:
            notes = (compared_while_training(), *notes)
        if not plan.slices:
            return PlanVerdict(notes=notes)
        if self._settings.loss_weight is not None:
            said = _("slices of a batch: as you said (--loss-weight {kind})", kind=plan.loss_weight)
            return PlanVerdict(notes=(said, *notes))
        if why := self._why_not_by_graph():
            return PlanVerdict({"accumulate": unless_said(why, LOSS_WEIGHT)})
        proven = _("slices of a batch: proven by the loss graph, which is compared with those before it while training")
        return PlanVerdict(notes=(proven, *self._remarks_by_graph(), *notes))
