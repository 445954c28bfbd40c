"""One decision for all processes of a training: what is predicted, what is changed, and what may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vram_guard.apply.microbatch import probe_layout, splitter_of
from vram_guard.errors import UnsupportedStepError
from vram_guard.guard._ranks import Outcome, attempt, from_rank_zero, gather
from vram_guard.guard.collectives import collectives_of, repeated_in_parts
from vram_guard.guard.decision import Decision
from vram_guard.guard.refusals import Refusal, check_pins, splitting_notes
from vram_guard.language import _
from vram_guard.watch.first_steps import correction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from vram_guard.budget import Budget
    from vram_guard.guard.settings import GuardSettings, PlanSettings
    from vram_guard.guard.training import CapturedTraining, Training
    from vram_guard.plan import Plan
    from vram_guard.watch.memory import MemoryReader


def decide(
    training: Training, settings: GuardSettings, reader: MemoryReader | None
) -> Outcome[tuple[CapturedTraining, Decision]]:
    """The decision, the same on every rank, with this rank's own reading of the training.

    It is planned for the rank with the least memory, by every rank for itself, and rank 0's plan is taken.

    Args:
        training: to decide for, on every rank at the same point.
        settings: of the guard.
        reader: of the memory of the device that trains; None where PyTorch counts none.
    """
    ranks = training.ranks
    budgets = attempt(ranks, lambda: budget_of(training.device, settings))
    if budgets.value is None:
        return Outcome(None, budgets.failure, budgets.error)
    least = min(gather(ranks, budgets.value), key=lambda budget: budget.usable)

    def here() -> tuple[CapturedTraining, Decision]:
        captured = training.capture()
        return captured, decide_alone(captured, settings, least, reader)

    outcome = attempt(ranks, here)
    if outcome.value is None or ranks.world_size == 1:
        return outcome
    captured, own = outcome.value
    # Timelines do not travel: each rank has traced for itself, and keeps its own to draw.
    shared = from_rank_zero(ranks, replace(own, plan=replace(own.plan, timeline=None, timeline_before=None)))
    drawn = replace(shared.plan, timeline=own.plan.timeline, timeline_before=own.plan.timeline_before)
    return Outcome((captured, replace(shared, plan=drawn)), None)


def budget_of(device: torch.device, settings: PlanSettings) -> Budget:
    """The budget of this rank's device.

    Raises:
        NoDeviceError: there is no GPU here and neither a budget nor a GPU's name was given.
    """
    from vram_guard.budget import Budget

    at_hand = settings.budget is None and settings.gpu is None and device.type == "cuda"
    return Budget.resolve(settings.budget, settings.gpu, settings.margin, device=device if at_hand else None)


def decide_alone(
    captured: CapturedTraining, settings: GuardSettings, budget: Budget, reader: MemoryReader | None
) -> Decision:
    """The decision of one rank.

    Raises:
        UnsupportedStepError: the step cannot be predicted, or a pin asks for what cannot be done here.
    """
    step, size, make = captured.step, captured.sample.batch_size, captured.sample.make
    known = correction(reader, captured.model, step.precision) if settings.remember else 1.0
    refusals = (Refusal("accumulate", why_not_split(make)), *captured.refusals(settings))
    refused = {technique: reason for technique, reason in refusals if reason}
    plan = _plan(captured, settings, budget, refused, known)
    collectives = collectives_of(plan.timeline_before)
    objections = [one for one in (captured.objection(plan), repeated_in_parts(collectives)) if one is not None]
    if objections:
        refused.update(objections)
        plan = _plan(captured, settings, budget, refused, known)
    asked_for = settings.asked_for | ({"grow"} if settings.grow else set())
    notes = [*captured.notes, *(Refusal(*one).words() for one in sorted(refused.items()) if one[0] in asked_for)]
    splitter = spare = None
    if "accumulate" not in refused:
        spare = splitter_of(make, plan.batch_size, plan.micro_batch_size)
    if plan.splits > 1:
        splitter = spare
        notes += splitting_notes(captured.model, settings.loss_weight, make, size)
    return Decision(plan, tuple(notes), splitter, spare, step.precision, refused, collectives)


def _plan(
    captured: CapturedTraining, settings: GuardSettings, budget: Budget, refused: Mapping[str, str], correction: float
) -> Plan:
    from vram_guard.plan import plan

    step, size = captured.step, captured.sample.batch_size
    check_pins(settings.pins, refused, precision=step.precision, batch_size=size)
    with captured.symbolic_run() as progress:
        return plan(
            step,
            size,
            budget,
            allow=settings.techniques,
            refused=refused,
            pin=settings.pins,
            blocks=settings.blocks,
            host_budget=settings.host_budget,
            grow=settings.grow,
            target_utilization=settings.target_utilization,
            lr_rule=settings.lr_rule,
            dataset_size=captured.epoch_samples,
            correction=correction,
            progress=progress,
        )


def why_not_split(make: Callable[[int], Any]) -> str:
    """The reason why the batches of a loader cannot be cut into micro-batches ("" where they can).

    Args:
        make: batch size -> a batch of the loader.
    """
    try:
        probe_layout(make)
    except UnsupportedStepError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the user's own code makes the batches
        return _("the loader cannot make batches of other sizes ({error})", error=f"{type(error).__name__}: {error}")
    return ""
