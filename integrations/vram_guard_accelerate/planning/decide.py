"""From a script at its first training batch to a plan: what is predicted, what would be changed, what may not be."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from vram_guard.apply.microbatch import CannotSplitError, probe_layout
from vram_guard.budget import Budget
from vram_guard.budget.host import host_share
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.plan import Plan, plan
from vram_guard.plan.descriptions import not_possible
from vram_guard.plan.source import Source
from vram_guard.simulate import TRACED_SIZES
from vram_guard_accelerate.apply.fsdp import wrapped_classes
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.forked_traces import ForkedTraces
from vram_guard_accelerate.dry_run.results import LoopFacts
from vram_guard_accelerate.launch_plan import LaunchPlan, LoaderPlace
from vram_guard_accelerate.planning.sharding_notes import sharding_notes, why_not_sharded
from vram_guard_accelerate.precision import ACCELERATES
from vram_guard_accelerate.relaunch.candidates import RelaunchCandidates
from vram_guard_accelerate.relaunch.equivalence import loss_weight
from vram_guard_accelerate.relaunch.relaunch import Relaunch
from vram_guard_accelerate.settings import Settings


@dataclass(frozen=True)
class ScriptPlan:
    """A plan for a script."""

    plan: Plan
    launch_plan: LaunchPlan
    """The same for the processes of the real launch."""
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""
    relaunches: tuple[Relaunch, ...] = ()
    """Relaunches that may be better, the likeliest first."""


def decide(
    first: FirstBatch,
    settings: Settings,
    budget: Budget,
    *,
    current: Relaunch | None = None,
    may_relaunch: bool = False,
) -> ScriptPlan:
    """Plan for the script that stands at its first training batch.

    Args:
        first: the script.
        settings: what may be changed.
        budget: for each process.
        current: the relaunch that this launch is.
        may_relaunch: whether whoever asks can run a relaunch dry.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why. Or this launch turns out to
            be another training than its baseline.
    """
    traces = ForkedTraces(first)
    look = traces.first_look()
    facts = look.facts
    if current is not None:
        current.check(first.precision, look.profile, first.shape.ranks)
    weight, unclear = _loss_weight(first, traces, facts, settings)
    refused = _refused(first, facts, unclear)
    candidates = RelaunchCandidates(first, look, settings) if may_relaunch else None
    without = set() if current is None else current.settled
    if candidates is not None:
        without |= candidates.reserved
        refused = {name: why for name, why in refused.items() if name not in candidates.reserved}

    def planned(source: Source, *, possible: Container[str] = (), growing: bool = settings.grow) -> Plan:
        return plan(
            source,
            first.sample.batch_size,
            budget,
            allow=settings.techniques - without,
            refused={name: why for name, why in refused.items() if name not in possible},
            host_budget=host_share(settings.host_budget, first.shape.local_ranks),
            grow=growing and "grow" not in without,
            target_utilization=settings.target_utilization,
            lr_rule=settings.lr_rule,
            dataset_size=first.sample.dataset_size,
        )

    source = Source(
        model=first.root,
        trace=traces.trace,
        precision=first.precision,
        accumulate=facts.batches_per_step,
        ranks=first.shape.ranks,
        sharded=first.fork_server is not None,
        sliced_by="model",
        forward_again=not facts.returns_loss,
    )

    def accumulated() -> Plan:
        smaller = replace(source, sliced_by="loader", forward_again=False)
        return planned(smaller, possible=("accumulate",), growing=False)

    made = planned(source)
    notes = [*first.sample.notes, *first.script.resumed.notes, *settings.refused]
    notes += [not_possible(name, why) for name, why in refused.items() if name not in without and settings.asks(name)]
    if traces.why_not_sliced and made.splits == 1:
        notes.append(not_possible("accumulate", traces.why_not_sliced))
    if made.splits > 1:
        notes += _slice_notes(first, facts)
    notes += sharding_notes(first, made, settings, traces.why_not_sharded)
    launch_plan = replace(_launch_plan(made, first), loss_weight=weight, returns_loss=facts.returns_loss)
    relaunches: tuple[Relaunch, ...] = ()
    if candidates is not None:
        relaunches = candidates.find(made, accumulated, current) if _lacks_something(made) else ()
        notes += candidates.notes
    if current is None:
        return ScriptPlan(made, launch_plan, tuple(notes), relaunches)
    notes += _batch_norm_notes(first, _("batch")) if current.change.splits > 1 else []
    notes = [*current.notes(), *notes]
    return ScriptPlan(current.combined(made), current.change.applied_to(launch_plan), tuple(notes), relaunches)


def _launch_plan(made: Plan, first: FirstBatch) -> LaunchPlan:
    """The changes that a plan means for the script that it was made for."""
    mixed = made.precision != made.precision_before
    script = first.script
    return LaunchPlan(
        precision=ACCELERATES[made.precision] if mixed else "",
        precision_option=script.precision_option if mixed else "",
        batch_size=made.batch_size_before,
        grown_batch_size=made.batch_size,
        micro_batch_size=made.micro_batch_size,
        # Where the script scales by that option too, rates would be scaled twice: the loader is made larger.
        batch_option=first.batch_size_option if _grows(made) and not script.options.scales_rates else "",
        loader=first.loader_place or LoaderPlace(),
        learning_rate_factor=made.learning_rate_factor,
        resumes_grown=script.resumed.factor not in (1.0, made.learning_rate_factor),
        models=len(first.models),
        recipe=made.recipe,
        wrapped=wrapped_classes(first.root, made.recipe.parameters_on_host),
    )


def _grows(made: Plan) -> bool:
    return made.batch_size != made.batch_size_before


def _lacks_something(made: Plan) -> bool:
    """Whether the script has to be changed, or does not fit."""
    return not made.fits or (made.changed and not _grows(made))


def _loss_weight(
    first: FirstBatch, traces: ForkedTraces, facts: LoopFacts, settings: Settings
) -> tuple[Literal["mean", "sum"], str]:
    """The reduction of the losses that models return; and why that cannot be told ("" where it can)."""
    if settings.loss_weight is not None:
        return settings.loss_weight, ""
    if not facts.losses or facts.counts_items or "accumulate" not in settings.techniques:
        return "mean", ""  # of a number that the loss is divided by, slices see by themselves whether it was used
    size = next(size for size in TRACED_SIZES if size != first.sample.batch_size)
    return loss_weight(facts.losses, first.sample.batch_size, traces.facts_at(size).losses, size)


# --- what cannot be done ----------------------------------------------------------------------------------------


def _refused(first: FirstBatch, facts: LoopFacts, unclear: str) -> dict[str, str]:
    """Technique -> the reason why it cannot be applied to this script."""
    clips = _("the script clips gradients, which a fused optimizer unscales itself")
    reasons = {
        "offload_parameters": why_not_sharded(first),
        "accumulate": _why_not_sliced(first, facts, unclear),
        "precision": _why_not_mixed(first),
        "grow": _why_not_grown(first),
        "fused": clips if facts.clips_gradients else "",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _why_not_grown(first: FirstBatch) -> str:
    if first.sample.growable or first.batch_size_option or first.loader_place is not None:
        return first.sample.growable
    return _(
        "the script makes no loader with the training's batch size (it gives it a batch sampler, or a library does)"
    )


def _why_not_sliced(first: FirstBatch, facts: LoopFacts, unclear: str) -> str:
    if facts.updates_others:
        return _("an optimizer updates parameters of a model that was not handed to Accelerator.prepare")
    if first.compiled:
        return _("a model that torch.compile compiles as a whole is not cut open")
    if unclear:
        return _(
            "of the loss that a model returns it cannot be told what to weigh slices by: {reason}; say --loss-weight",
            reason=unclear,
        )
    try:
        probe_layout(first.sample.make)
    except (CannotSplitError, UnsupportedStepError) as error:
        return str(error)
    return ""


def _why_not_mixed(first: FirstBatch) -> str:
    if first.precision != "32-true":
        return _("the precision was chosen by the user and stays")
    if first.script.precision_option:
        return ""
    if first.script.precision_given:
        return _("the script passes its own mixed_precision to the Accelerator, and that wins")
    if first.script.reads_precision:
        return _(
            "the script asks accelerator.mixed_precision and acts on the answer before it trains; pass "
            "--mixed_precision to see what it does then"
        )
    return ""


# --- notes ------------------------------------------------------------------------------------------------------


def _slice_notes(first: FirstBatch, facts: LoopFacts) -> list[str]:
    notes = _batch_norm_notes(first, _("slice"))
    if not facts.returns_loss:
        notes.append(_("the script computes its loss outside the model: slices run their forward twice"))
    if any("Dropout" in type(module).__name__ and getattr(module, "p", 0) for module in first.root.modules()):
        notes.append(_("dropout draws other random numbers for slices; the result is as random as before"))
    return notes


def _batch_norm_notes(first: FirstBatch, part: str) -> list[str]:
    from torch.nn.modules.batchnorm import _BatchNorm

    if any(isinstance(module, _BatchNorm) and module.training for module in first.root.modules()):
        return [_("batch normalisation takes its statistics over the samples of a {part}", part=part)]
    return []
