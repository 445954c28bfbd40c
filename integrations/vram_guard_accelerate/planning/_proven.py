"""Acceptance of a plan whose step is the script's own: by its graph or the user's word, if no run refutes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.techniques import FORMS
from vram_guard.proof.effects import but_for_statistics, compared_while_training, other_draws, unless_said
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe
from vram_guard_accelerate._settings import LOSS_WEIGHT

if TYPE_CHECKING:
    from vram_guard.proof.small_steps import SmallSteps
    from vram_guard_accelerate._launch_plan import LaunchPlan
    from vram_guard_accelerate._settings import LaunchSettings
    from vram_guard_accelerate.dry_run.proofs import Proofs, ScriptProof


#: Fields of a recipe that are proven by running, and the techniques that they belong to.
_FIELDS = {
    "checkpoint": "checkpoint",
    "offload_activations": "offload_activations",
    "chunked_head": "chunked_loss",
}


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
        proofs: of what runs.
        settings: what the user said.
        why_not_by_graph: the reason why the loss graph does not prove slices; "" where it does.
        remarks_by_graph: what it does not show.
        small_steps: see :mod:`vram_guard.proof.small_steps`.
        only_by_running: whether slices are cut as one call of the model reads, which nothing but a run confirms.
    """

    def __init__(
        self,
        proofs: Proofs,
        settings: LaunchSettings,
        why_not_by_graph: Callable[[], str],
        remarks_by_graph: Callable[[], tuple[str, ...]],
        small_steps: Callable[[Recipe], SmallSteps | None],
        *,
        only_by_running: bool = False,
    ) -> None:
        self._proofs = proofs
        self._settings = settings
        self._why_not_by_graph = why_not_by_graph
        self._remarks_by_graph = remarks_by_graph
        self._small_steps = small_steps
        self._only_by_running = only_by_running

    def of(self, plan: LaunchPlan, *, batch_norm: bool = False) -> PlanVerdict:
        """Whether this plan may be used. Techniques that leave every number as it is are not looked at.

        Args:
            plan: for the script.
            batch_norm: whether its slices have batch normalisation's statistics of their own.
        """
        steps = self._small_steps(plan.recipe)
        if steps is not None and steps.refutation:
            return PlanVerdict({FORMS[plan.recipe.optimizer]: steps.refutation})
        verdict = self._of_model(plan, batch_norm=batch_norm)
        compared = (compared_while_training(),) if plan.recipe.checkpoint else ()
        return replace(verdict, notes=(*verdict.notes, *compared, *(() if steps is None else (steps.words(),))))

    def _of_model(self, plan: LaunchPlan, *, batch_norm: bool) -> PlanVerdict:
        said = plan.slices and self._settings.loss_weight is not None and not self._only_by_running
        notes = (_("slices of a batch: as you said (--loss-weight {kind})", kind=plan.loss_weight),) if said else ()
        ways = list(_parts(plan, with_slices=not said))
        if not ways:
            return PlanVerdict(notes=notes)
        whole = _whole(plan, with_slices=not said)
        if whole.slices:
            why = self._why_not_by_graph()
            if why:
                return PlanVerdict({"accumulate": unless_said(why, LOSS_WEIGHT)})
            notes = (*notes, _("slices of a batch: proven by the loss graph"))
        proof = self._proofs.of(whole)
        if proof.why_not:
            if plan.recipe.chunked_head:  # nothing but a run shows what else the script does with its logits
                return PlanVerdict({"chunked_loss": proof.why_not})
            return self._not_run(proof, slices=whole.slices, notes=notes)
        if not proof.difference:
            drawn = (other_draws(),) if proof.random and whole.slices else ()
            return PlanVerdict(notes=(*notes, _was_run(proof, statistics=batch_norm), *drawn))
        found = {name: why for name, part in ways if (why := self._proofs.of(part).refutation)}
        found = found or {ways[-1][0]: proof.refutation}
        if "accumulate" in found and not self._only_by_running:
            found["accumulate"] = unless_said(found["accumulate"], LOSS_WEIGHT)
        return PlanVerdict(found)

    def _not_run(self, proof: ScriptProof, *, slices: bool, notes: tuple[str, ...]) -> PlanVerdict:
        if not slices:
            return PlanVerdict(notes=notes)
        if self._only_by_running:
            return PlanVerdict({"accumulate": only_running_shows(proof.why_not)})
        return PlanVerdict(
            notes=(*notes, _("a few samples were not run ({why})", why=proof.why_not), *self._remarks_by_graph())
        )


def _parts(plan: LaunchPlan, *, with_slices: bool) -> list[tuple[str, LaunchPlan]]:
    """The plan technique by technique."""
    alone = {name: getattr(plan.recipe, name) for name in _FIELDS}
    nothing = {name: getattr(AS_WRITTEN, name) for name in _FIELDS}
    found = []
    if plan.slices and with_slices:
        found.append(("accumulate", replace(plan, recipe=plan.recipe.with_(**nothing))))
    whole = _whole(plan, with_slices=False)
    for name, treated in alone.items():
        if treated:
            recipe = plan.recipe.with_(**{**nothing, name: treated})
            found.append((_FIELDS[name], replace(whole, recipe=recipe.with_(checkpoint_keeps=()))))
            if recipe.checkpoint_keeps:
                found.append(("selective_checkpoint", replace(whole, recipe=recipe)))
    return found


def _whole(plan: LaunchPlan, *, with_slices: bool) -> LaunchPlan:
    return plan if with_slices else replace(plan, micro_batch_size=plan.grown_batch_size)


def only_running_shows(why_not: str) -> str:
    """The reason why slices are not possible in a loop without a loader whose step was not run."""
    return _(
        "the script makes its batches without a DataLoader: only a run shows that its samples can be cut apart, and "
        "none was made ({why}); --proof-seconds is the time that it may take",
        why=why_not,
    )


def _was_run(proof: ScriptProof, *, statistics: bool) -> str:
    """The words for a run that refuted nothing; ``statistics``: but for those of batch normalisation in slices."""
    said = _(
        "the plan: {count} samples were run as written and under it, with equal losses, gradients, weights, buffers "
        "and attributes",
        count=proof.samples,
    )
    return said + but_for_statistics() if statistics else said
