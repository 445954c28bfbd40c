"""From a runner to a decision: what is predicted, what would be changed, and what may not be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from mmengine.device import get_device
from mmengine.optim import OptimWrapper

from vram_guard.apply.microbatch import CannotSplitError, Splitter, probe_layout, splitter_of
from vram_guard.capture import ranks
from vram_guard.errors import UnsupportedStepError
from vram_guard.plan.descriptions import not_possible
from vram_guard.watch.first_steps import correction
from vram_guard.watch.memory import reader_for
from vram_guard_mmengine import rates, recovery
from vram_guard_mmengine.capture import Captured, capture, checkpointed_by_config
from vram_guard_mmengine.processes import Processes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.watch.memory import MemoryReader
    from vram_guard_mmengine.settings import Settings

#: What a plan may not use under MMEngine, which builds the optimizer first and initialises or loads weights after it.
NOT_HERE = {
    "half": "MMEngine has no optimizer wrapper for true half precision",
    "offload_frozen": "MMEngine loads weights after the model is placed",
    "offload_optimizer": "MMEngine loads weights after the optimizer is built, which would step from older ones",
    "offload_parameters": "MMEngine loads weights after the optimizer is built",
}


@dataclass(frozen=True)
class Decision:
    """What all ranks hold in common."""

    plan: Plan
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""
    splitter: Splitter | None
    """How loaded batches are cut; None where they stay whole."""
    spare: Splitter | None = None
    """How they would be cut after an out-of-memory error; None where none is to be recovered from."""
    precision: str = "32-true"
    """As written."""

    def with_notes(self, *notes: str) -> Decision:
        """The same with more to say."""
        return replace(self, notes=(*self.notes, *notes))


def decide(runner: Any, settings: Settings) -> ranks.Outcome[Decision]:
    """One decision, the same on every rank: planned for the rank with the least memory, taken by rank 0."""
    processes = Processes()
    captured = ranks.attempt(processes, lambda: capture(runner))
    if captured.value is None:
        return ranks.Outcome(None, captured.failure, captured.error)
    found = captured.value
    budgets = ranks.attempt(processes, lambda: budget_of(settings))
    if budgets.value is None:
        return ranks.Outcome(None, budgets.failure, budgets.error)
    least = min(ranks.gather(processes, budgets.value), key=lambda budget: budget.usable)
    outcome = ranks.attempt(processes, lambda: _decide_here(runner, found, settings, least))
    if outcome.value is None or processes.world_size == 1:
        return outcome
    own = outcome.value
    # Timelines do not travel: each rank has traced for itself.
    plan = replace(own.plan, timeline=None, timeline_before=None)
    return ranks.Outcome(ranks.from_rank_zero(processes, replace(own, plan=plan)), None)


def budget_of(settings: Settings) -> Budget:
    """What this rank's device may give.

    Raises:
        NoDeviceError: there is no GPU here and neither a budget nor a GPU's name was given.
    """
    from vram_guard.budget import Budget

    at_hand = settings.budget is None and settings.gpu is None and get_device() == "cuda"
    device = torch.cuda.current_device() if at_hand else None
    return Budget.resolve(settings.budget, settings.gpu, settings.margin, device=device)


def _decide_here(runner: Any, captured: Captured, settings: Settings, budget: Budget) -> Decision:
    refused = _refused(runner, captured, settings)
    allow = frozenset(settings.allow or ()) - refused.keys()
    plan = _plan(captured, settings, budget, allow, grow=settings.grow and "grow" not in refused)
    asked = [name for name in refused if name in _named(settings) or (name == "grow" and settings.grow)]
    notes = [
        *captured.notes,
        *(not_possible(name, refused[name]) for name in asked),
    ]
    splitter = spare = None
    if plan.splits > 1:
        splitter = splitter_of(captured.sample.make, plan.batch_size, plan.micro_batch_size)
        notes += _about_splitting(captured.step.model, settings)
    if settings.recover and settings.mode == "fit":
        no_recovery = _why_not_recover(runner, settings, refused)
        make, size, micro = captured.sample.make, plan.batch_size, plan.micro_batch_size
        spare = None if no_recovery else splitter or splitter_of(make, size, micro)
        if no_recovery:
            notes.append(f"a real out-of-memory error would not be recovered from: {no_recovery}")
    if plan.batch_size != plan.batch_size_before:
        notes += _about_growth(runner, captured, plan)
    return Decision(plan, tuple(notes), splitter, spare, captured.step.precision)


def _plan(captured: Captured, settings: Settings, budget: Budget, allow: frozenset[str], *, grow: bool) -> Plan:
    from vram_guard.plan import plan

    with captured.lent():
        return plan(
            captured.step,
            captured.sample.batch_size,
            budget,
            allow=allow,
            pin=settings.pin,
            blocks=settings.blocks,
            host_budget=settings.host_budget,
            grow=grow,
            target_utilization=settings.target_utilization,
            lr_rule=settings.lr_rule,
            dataset_size=captured.epoch_samples,
            correction=_correction(captured) if settings.remember else 1.0,
        )


def _correction(captured: Captured) -> float:
    return correction(reader_here(), captured.step.model, captured.step.precision)  # type: ignore[arg-type]


def reader_here() -> MemoryReader | None:
    """The memory of the device that trains; None where PyTorch counts none. The tests' one seam."""
    return reader_for(torch.device(get_device()))


# --- what may not be changed --------------------------------------------------------------------------------


def _refused(runner: Any, captured: Captured, settings: Settings) -> dict[str, str]:
    """Technique -> why it cannot be applied to this training."""
    reasons = {
        "accumulate": _why_not_split(captured),
        "precision": _why_not_mixed(captured),
        "grow": captured.sample.growable if settings.grow else "",
        "checkpoint": "activation_checkpointing is set in the config" if checkpointed_by_config(runner) else "",
        "8bit": "states of a checkpoint cannot become 8-bit ones" if getattr(runner, "_resume", False) else "",
        **NOT_HERE,
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _named(settings: Settings) -> frozenset[str]:
    """The techniques worth a word when they are refused: the usual ones, or those that the user asked for."""
    return frozenset(settings.allow or ()) - (NOT_HERE.keys() if settings.by_default else frozenset())


def _why_not_recover(runner: Any, settings: Settings, refused: dict[str, str]) -> str:
    if "accumulate" not in (settings.allow or ()):
        return "smaller micro-batches are not allowed"
    return refused.get("accumulate", "") or recovery.why_not(runner)


def _why_not_split(captured: Captured) -> str:
    try:
        probe_layout(captured.sample.make)
    except (CannotSplitError, UnsupportedStepError) as error:
        return str(error)
    return ""


def _why_not_mixed(captured: Captured) -> str:
    if captured.optim.precision != "32-true":
        return "the precision was chosen by the user and stays"
    if captured.optim.built:
        return "optim_wrapper was built before the runner; describe it as a dict instead"
    if captured.optim.kind is not OptimWrapper:
        return f"the optimizer wrapper {captured.optim.kind.__name__} was chosen by the user and stays"
    return ""


# --- what a change means beside memory ----------------------------------------------------------------------


def _about_splitting(model: Any, settings: Settings) -> list[str]:
    notes = []
    if settings.loss_weight == "mean":
        notes.append(
            "micro-batches are weighed by their samples, which is exact for losses that are means over the samples of "
            "the batch; losses normalised by counts (positives in detection, pixels that are not ignored) come out "
            "slightly different"
        )
    if any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()):  # noqa: SLF001
        notes.append("batch normalisation takes its statistics over the samples of a micro-batch")
    return notes


def _about_growth(runner: Any, captured: Captured, plan: Plan) -> list[str]:
    notes = [f"train_dataloader.batch_size: {plan.batch_size_before} -> {plan.batch_size}, as if it were written so"]
    if captured.epoch_samples is None:
        notes.append(f"max_iters, intervals and schedules count iterations of {plan.batch_size} samples")
    if rates.auto_scaled(runner):
        notes.append("learning rates: auto_scale_lr follows the larger batch by itself; nothing is scaled twice")
    return notes
