"""From a Trainer to a decision: what is predicted, what would be changed, and what may not be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from vram_guard.apply.loss_weight import IGNORED
from vram_guard.apply.microbatch import CannotSplitError, Splitter, probe_layout, splitter_of
from vram_guard.errors import UnsupportedStepError
from vram_guard.plan.descriptions import not_possible
from vram_guard_lightning import growth, metrics, namespaces, private_api, ranks
from vram_guard_lightning.capture import Captured, capture

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard_lightning.settings import Settings


@dataclass(frozen=True)
class Decision:
    """What all ranks hold in common."""

    plan: Plan
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""
    splitter: Splitter | None
    """How loaded batches are cut; None where they stay whole."""
    spare: Splitter | None = None
    """How they would be cut after an out-of-memory error; None where that is not known."""

    def with_notes(self, *notes: str) -> Decision:
        """The same with more to say."""
        return replace(self, notes=(*self.notes, *notes))


def decide(trainer: Trainer, module: LightningModule, settings: Settings) -> ranks.Outcome[Decision]:
    """One decision, the same on every rank: planned for the rank with the least memory, taken by rank 0."""
    budgets = ranks.attempt(trainer, lambda: budget_of(trainer, settings))
    if budgets.failure is not None:
        return ranks.Outcome(None, budgets.failure, budgets.error)
    least = min(ranks.gather(trainer, budgets.unwrap()), key=lambda budget: budget.usable)
    outcome = ranks.attempt(trainer, lambda: _decide_here(trainer, module, settings, least))
    if outcome.value is None:
        return outcome
    return ranks.Outcome(_shared(trainer, outcome.value), None)


def _shared(trainer: Trainer, own: Decision) -> Decision:
    """Rank 0's decision. Timelines do not travel: each rank has traced for itself, and keeps its own to draw."""
    if trainer.world_size == 1:
        return own
    shared = ranks.from_rank_zero(trainer, replace(own, plan=replace(own.plan, timeline=None, timeline_before=None)))
    drawn = replace(shared.plan, timeline=own.plan.timeline, timeline_before=own.plan.timeline_before)
    return replace(shared, plan=drawn)


def budget_of(trainer: Trainer, settings: Settings) -> Budget:
    """What this rank's device may give.

    Raises:
        NoDeviceError: there is no GPU here and neither a budget nor a GPU's name was given.
    """
    from vram_guard.budget import Budget

    device = trainer.strategy.root_device
    at_hand = settings.budget is None and settings.gpu is None and device.type == "cuda"
    return Budget.resolve(settings.budget, settings.gpu, settings.margin, device=device if at_hand else None)


def _decide_here(trainer: Trainer, module: LightningModule, settings: Settings, budget: Budget) -> Decision:
    captured = capture(trainer, module)
    refused = _refused(trainer, module, captured, settings)
    _check_pins(settings, refused)
    allow = frozenset(settings.allow) - refused.keys()
    plan = _plan(captured, settings, budget, allow, grow=settings.grow and "grow" not in refused)
    if "precision" in allow and (reason := _no_scaler(trainer, captured, plan)):
        refused["precision"] = reason
        plan = _plan(captured, settings, budget, allow - {"precision"}, grow=False)
    asked = {name for name in refused if name in settings.named or (name == "grow" and settings.grow)}
    notes = list(captured.notes)
    notes += [not_possible(name, refused[name]) for name in sorted(asked)]
    splitter = None
    if plan.splits > 1:
        splitter = splitter_of(captured.sample.make, plan.batch_size, plan.micro_batch_size)
        notes += _about_splitting(module, captured.sample.make(captured.sample.batch_size), settings)
    spare = splitter
    if splitter is None and settings.recover and "accumulate" in settings.allow and "accumulate" not in refused:
        spare = splitter_of(captured.sample.make, plan.batch_size, plan.batch_size)
    return Decision(plan, tuple(notes), splitter, spare)


def _plan(captured: Captured, settings: Settings, budget: Budget, allow: frozenset[str], *, grow: bool) -> Plan:
    from rich.console import Console

    from vram_guard.plan import plan

    correction = metrics.correction_for(captured.trainer, captured.module) if settings.remember else 1.0
    # A spinner on a terminal, nothing elsewhere: large models take some seconds.
    status = Console(stderr=True, quiet=not captured.trainer.is_global_zero).status("vram_guard: reading the training")
    with status, captured.lent():
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
            correction=correction,
            progress=lambda line: status.update(f"vram_guard: {line}"),
        )


# --- what may not be changed --------------------------------------------------------------------------------


def _refused(trainer: Trainer, module: LightningModule, captured: Captured, settings: Settings) -> dict[str, str]:
    """Technique -> why it cannot be applied to this training."""
    reasons = {
        "accumulate": _why_not_split(trainer, module, captured),
        "precision": _why_not_mixed(trainer),
        **_why_not_on_host(trainer, captured),
        "grow": growth.why_not(trainer, captured.sample.growable) if settings.grow else "",
    }
    return {name: reason for name, reason in reasons.items() if reason}


_PINNED = {
    "micro_batch_size": "accumulate",
    "precision": "precision",
    "optimizer_on_host": "offload_optimizer",
    "parameters_on_host": "offload_parameters",
}


def _check_pins(settings: Settings, refused: dict[str, str]) -> None:
    """Raises UnsupportedStepError where a pin asks for what cannot be done in this training."""
    for pin, technique in _PINNED.items():
        if getattr(settings.pin, pin) and technique in refused:
            raise UnsupportedStepError(f"{pin} is pinned, but {not_possible(technique, refused[technique], where='')}")


def _why_not_split(trainer: Trainer, module: LightningModule, captured: Captured) -> str:
    if not module.automatic_optimization:
        return "manual optimization does its own backward and steps; accumulate inside training_step instead"
    if missing := private_api.missing(namespaces.of(trainer), private_api.MICRO_BATCHES):
        return f"this release of Lightning is not known: {missing[0]}"
    try:
        probe_layout(captured.sample.make)
    except (CannotSplitError, UnsupportedStepError) as error:
        return str(error)
    return ""


def _why_not_on_host(trainer: Trainer, captured: Captured) -> dict[str, str]:
    sharded = (
        "the strategy holds whole parameters; shard them with strategy=ModelParallelStrategy() and fully_shard in "
        "configure_model"
    )
    optimizer = ""
    if trainer.gradient_clip_val:
        optimizer = "gradients are clipped on the GPU after they have been copied to the host"
    elif captured.step.data_parallel_ranks > 1:
        optimizer = "every rank would update a copy of its own"
    return {"offload_parameters": sharded, "offload_optimizer": optimizer}


def _why_not_mixed(trainer: Trainer) -> str:
    plugin = trainer.precision_plugin
    namespace = namespaces.of(trainer)
    own = (namespaces.part(namespace, "plugins.precision.Precision"),)
    if trainer.precision == "32-true" and type(plugin) not in own:
        return f"the precision plugin {type(plugin).__name__} was set by the user and stays"
    return ""


def _no_scaler(trainer: Trainer, captured: Captured, plan: Plan) -> str:
    """Why the optimizer does not go together with float16's gradient scaling ("" where it does)."""
    if plan.precision != "16-mixed" or plan.precision_before == "16-mixed":
        return ""
    if "LBFGS" in captured.optimizer_traits:
        return "LBFGS does not work with the gradient scaling that 16-mixed needs"
    if "fused" in captured.optimizer_traits and trainer.gradient_clip_val:
        return "a fused optimizer unscales gradients itself, so that they cannot be clipped under 16-mixed"
    return ""


# --- what a split changes beside memory ---------------------------------------------------------------------


def _about_splitting(module: LightningModule, example: Any, settings: Settings) -> list[str]:
    notes = []
    if settings.loss_weight == "mean":
        notes.append(
            "micro-batches are weighed by their samples, which is exact for a loss that is a mean over the "
            "samples of the batch; say loss_weight='sum' or a function of the batch for other losses"
        )
        if _has_ignored_labels(example):
            notes.append(
                f"the batch holds labels of {IGNORED}: a loss that ignores them is a mean over the others; "
                "for the exact result pass loss_weight=lambda batch: (batch['labels'] != -100).sum() or alike"
            )
    if any(_drops_out(part) for part in module.modules()):
        notes.append("dropout draws other random numbers for micro-batches; the result is as random as before")
    return notes


def _drops_out(part: torch.nn.Module) -> bool:
    return "Dropout" in type(part).__name__ and part.training and bool(getattr(part, "p", 0))


def _has_ignored_labels(example: Any) -> bool:
    leaves = pytree.tree_leaves(dict(example) if hasattr(example, "keys") else example)
    labels = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64]
    return any(bool((leaf == IGNORED).any()) for leaf in labels)
