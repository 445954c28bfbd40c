"""Proof that a plan leaves what is learned as it was, by what holds for every value.

Micro-batches are proven by the form of the loss, or are as the user said; while training, the graph of each batch's
loss is compared with those before it (:mod:`vram_guard.techniques.loss_graphs`). Recomputations are compared with the
first forward while training (:mod:`vram_guard.techniques.comparing`). An optimizer in another form steps small weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.language import _
from vram_guard.plan.descriptions import sharding_words
from vram_guard.plan.techniques import FORMS
from vram_guard.proof.effects import compared_while_training, other_draws, other_draws_of_slices, unless_said
from vram_guard.proof.reduction import reduction
from vram_guard.proof.small_steps import SmallSteps, small_steps
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.guard.training import CapturedTraining
    from vram_guard.plan import Plan
    from vram_guard.proof.loss_graph import LossGraph


@dataclass(frozen=True)
class Proof:
    """How it is known that the plan leaves what is learned as it was."""

    words: str
    """For a reader of the prediction; "" where nothing was to be proven."""
    loss_weight: LossWeight | None = None
    """Of micro-batches, where it was found out; None: as the user said."""
    notes: tuple[str, ...] = ()
    """What is other than as written all the same."""


@dataclass(frozen=True)
class Disproof:
    """Why a technique must not be used."""

    technique: str
    reason: str


def prove(captured: CapturedTraining, plan: Plan, graph: LossGraph, loss_weight: LossWeight | None) -> Proof | Disproof:
    """Proof that a plan leaves what is learned as it was.

    Args:
        captured: the training, in a copy of its process.
        plan: that changes it.
        graph: of its loss.
        loss_weight: as the user said; None: to be found out.
    """
    recipe = plan.recipe
    if recipe.optimizer_in_backward and captured.read_afterwards:
        return Disproof("optimizer_in_backward", _("hooks that run after the step may read gradients, which are gone"))
    refuted = _by_graph(captured, plan, graph)
    if refuted is not None:
        return refuted
    notes = []
    for technique, part in _optimizers(recipe):
        steps = _small_steps(captured, part)
        if steps is not None and steps.refutation:
            return Disproof(technique, steps.refutation)
        notes += [] if steps is None else [steps.words()]
    words, weight = "", None
    if plan.splits > 1 and loss_weight is not None:
        words = _("micro-batches as you said (loss_weight)")
    elif plan.splits > 1:
        weight, why = reduction(captured, plan, graph)
        if weight is None:
            return Disproof("accumulate", unless_said(why))
        words = _proven(weight)
    return Proof(words, weight, (*notes, *_remarks(captured, plan, graph, counted=weight is not None)))


def _by_graph(captured: CapturedTraining, plan: Plan, graph: LossGraph) -> Disproof | None:
    """What the step itself does to what would come back from the host."""
    recipe = plan.recipe
    if not recipe.offload_activations and not recipe.frozen_on_host:
        return None
    try:
        with captured.symbolic_run():
            unknown, written = graph.own_backward(plan.batch_size), graph.written(plan.batch_size)
    except Exception as error:  # noqa: BLE001 - the user's own code runs in it
        unknown, written = f"{type(error).__name__}: {error}", ()
    if recipe.offload_activations and unknown:
        return Disproof("offload_activations", unknown)
    for name in written:
        if any(name.startswith(f"{frozen}.") for frozen in recipe.frozen_on_host):
            return Disproof("offload_frozen", _("the step itself writes to {name}", name=name))
    return None


def _optimizers(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Each change of the optimizer by itself, with its technique."""
    if recipe.optimizer != AS_WRITTEN.optimizer:
        yield FORMS[recipe.optimizer], AS_WRITTEN.with_(optimizer=recipe.optimizer)
    if recipe.optimizer_on_host:
        yield "offload_optimizer", AS_WRITTEN.with_(optimizer_on_host=True)


def _small_steps(captured: CapturedTraining, recipe: Recipe) -> SmallSteps | None:
    """Of the recipe's optimizer; None where the step has none."""
    make = captured.step.optimizer
    if make is None:
        return None

    def as_written() -> torch.optim.Optimizer:
        with captured.symbolic_run():
            return make(captured.model.parameters())

    return small_steps(as_written, recipe)


def _proven(kind: LossWeight) -> str:
    """How micro-batches are known to be exact."""
    if isinstance(kind, Normaliser):
        return _("micro-batches are proven by the loss graph: the loss is divided by {count}", count=kind.words())
    if isinstance(kind, EveryLabel):
        return _(
            "micro-batches are proven by the loss graph: means over samples and over labels, which are the same where "
            "every label counts"
        )
    return _("micro-batches are proven by the loss graph: a {kind} over the samples", kind=kind)


def _remarks(captured: CapturedTraining, plan: Plan, graph: LossGraph, *, counted: bool) -> Iterator[str]:
    """What is other than as written all the same, and what is compared while training."""
    recipe, splits = plan.recipe, plan.splits > 1
    if splits or recipe.slices is not None:
        random, logged = _draws_and_logs(captured, plan, graph)
        if random:
            yield other_draws() if splits else other_draws_of_slices()
        if logged and splits:
            yield _(
                "these logged values are not known to be means over the samples, and may be others in micro-batches: "
                "{names}",
                names=", ".join(logged),
            )
    if counted:
        yield _("while training, the graph of each batch's loss is compared with those before it")
    if recipe.checkpoint or recipe.slices is not None:
        yield compared_while_training()
    if recipe.sharding is not None:
        yield not_in_copy(sharding_words(recipe.sharding))


def _draws_and_logs(captured: CapturedTraining, plan: Plan, graph: LossGraph) -> tuple[bool, tuple[str, ...]]:
    """Whether the step draws random numbers, and the logged values of which nothing is known."""
    try:
        with captured.symbolic_run():
            return graph.draws(plan.batch_size), graph.unknown_logs(plan.batch_size)
    except Exception:  # noqa: BLE001 - the user's own code runs in it; then it is not known
        return True, ()


def not_in_copy(change: str) -> str:
    """The words for a change of how the model is divided, which leaves its numbers as they are."""
    return _(
        "{change}: the same numbers are gathered and reduced, at another time or from another place", change=change
    )
