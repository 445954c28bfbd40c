"""From a script at its first training batch to a plan: what is predicted, what would be changed, what may not be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vram_guard.apply.microbatch import CannotSplitError, probe_layout
from vram_guard.budget.host import host_share
from vram_guard.errors import UnsupportedStepError
from vram_guard.plan import plan
from vram_guard.plan.descriptions import not_possible
from vram_guard.plan.source import Source
from vram_guard.simulate import TRACED_SIZES
from vram_guard_accelerate.dry_run.script_options import batch_size_option, precision_option
from vram_guard_accelerate.launch_plan import Orders
from vram_guard_accelerate.planning.sharding_notes import about_sharding, why_not_sharded
from vram_guard_accelerate.relaunch.candidates import Wishes, check
from vram_guard_accelerate.relaunch.equivalence import loss_weight

if TYPE_CHECKING:
    from collections.abc import Container

    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.results import Facts
    from vram_guard_accelerate.dry_run.run import DryRun
    from vram_guard_accelerate.relaunch.relaunch import Varied
    from vram_guard_accelerate.settings import Settings


@dataclass(frozen=True)
class Decision:
    """A plan for a script."""

    plan: Plan
    orders: Orders
    """What the processes of the real launch are to do."""
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""
    wanted: tuple[Varied, ...] = ()
    """Variants of the launch that may be better, the likeliest first."""


def decide(
    run: DryRun, settings: Settings, budget: Budget, *, varied: Varied | None = None, may_vary: bool = False
) -> Decision:
    """Plan for the script that stands at its first training batch.

    Args:
        run: the script.
        settings: what may be changed.
        budget: for each process.
        varied: of which launch this one is a variant.
        may_vary: whether whoever asks can run a variant of this launch dry.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why. Or this launch turns out to
            be another training than the one that it is a variant of.
    """
    assert run.sample is not None
    facts = run.traces.first_look()
    if varied is not None:
        check(varied, run, facts)
    weight, unclear = _loss_weight(run, facts, settings)
    refused = _refused(run, facts, unclear)
    wishes = Wishes(run, settings, facts, refused) if may_vary else None
    without = set() if varied is None else varied.settled
    if wishes is not None:
        without |= wishes.to_be_varied
        refused = {name: why for name, why in refused.items() if name not in wishes.to_be_varied}

    def planned(source: Source, *, possible: Container[str] = (), growing: bool = settings.grow) -> Plan:
        assert run.sample is not None
        return plan(
            source,
            run.sample.batch_size,
            budget,
            allow=settings.techniques - without,
            refused={name: why for name, why in refused.items() if name not in possible},
            host_budget=host_share(settings.host_budget, run.local_ranks),
            grow=growing and "grow" not in without,
            target_utilization=settings.target_utilization,
            lr_rule=settings.lr_rule,
            dataset_size=run.sample.dataset_size,
        )

    source = _source(run, facts)
    made = planned(source)
    notes = [*run.sample.notes, *run.notes, *run.resumed.notes, *settings.refused]
    notes += [
        not_possible(name, why) for name, why in refused.items() if _asked(name, settings) and name not in without
    ]
    if run.traces.why_not_sliced and made.splits == 1:
        notes.append(not_possible("accumulate", run.traces.why_not_sliced))
    if made.splits > 1:
        notes += _about_slices(run, facts)
    notes += about_sharding(run, made)
    orders = replace(Orders.of(made, run), loss_weight=weight, returns_loss=facts.inside)
    wanted = wishes.wanted(made, source, planned, varied) if wishes is not None and _lacks_something(made) else ()
    notes += wishes.notes if wishes is not None else []
    if varied is not None:
        notes += _about_batch_norm(run, "batch") if varied.variant.splits > 1 else []
        return Decision(varied.combined(made), varied.variant.in_orders(orders), (*varied.notes(), *notes), wanted)
    return Decision(made, orders, tuple(notes), wanted)


def _lacks_something(made: Plan) -> bool:
    """Whether the script has to be changed, or does not fit."""
    grown = made.batch_size != made.batch_size_before
    return not made.fits or (made.changed and not grown)


def _loss_weight(run: DryRun, facts: Facts, settings: Settings) -> tuple[Literal["mean", "sum"], str]:
    """What a loss that the models return is over their samples; and why that cannot be told ("" where it can)."""
    assert run.sample is not None
    if settings.loss_weight is not None:
        return settings.loss_weight, ""
    if not facts.losses or facts.counts_items or "accumulate" not in settings.techniques:
        return "mean", ""  # of a number that the loss is divided by, slices see by themselves whether it was used
    size = next(size for size in TRACED_SIZES if size != run.sample.batch_size)
    other = run.traces.facts_at(size)
    return loss_weight(facts.losses, run.sample.batch_size, other.losses, size)


def _asked(name: str, settings: Settings) -> bool:
    return settings.grow if name == "grow" else name in settings.allow


def _source(run: DryRun, facts: Facts) -> Source:
    return Source(
        model=run.root,
        trace=run.traces.trace,
        precision=run.precision,
        accumulate=facts.batches_per_step,
        ranks=run.ranks,
        sharded=run.standby is not None,
        sliced_by="model",
        forward_again=not facts.inside,
    )


def _refused(run: DryRun, facts: Facts, unclear: str) -> dict[str, str]:
    """Technique -> why it cannot be applied to this script."""
    reasons = {
        "offload_parameters": why_not_sharded(run, compiled=_compiled(run)),
        "accumulate": _why_not_sliced(run, facts, unclear),
        "precision": _why_not_mixed(run),
        "grow": _why_not_grown(run),
        "fused": "the script clips gradients, which a fused optimizer unscales itself" if facts.clips else "",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _why_not_grown(run: DryRun) -> str:
    assert run.sample is not None
    if run.sample.growable or batch_size_option(run) or run.training_loader is not None:
        return run.sample.growable
    return "the script makes no loader with the training's batch size (it gives it a batch sampler, or a library does)"


def _why_not_sliced(run: DryRun, facts: Facts, unclear: str) -> str:
    if facts.foreign:
        return "an optimizer updates parameters of a model that was not handed to Accelerator.prepare"
    if _compiled(run):
        return "a model that torch.compile compiles as a whole is not cut open"
    if unclear:
        return (
            f"of the loss that a model returns it cannot be told what to weigh slices by: {unclear}; say --loss-weight"
        )
    assert run.sample is not None
    try:
        probe_layout(run.sample.make)
    except (CannotSplitError, UnsupportedStepError) as error:
        return str(error)
    return ""


def _compiled(run: DryRun) -> bool:
    backend = getattr(run.accelerator.state.dynamo_plugin, "backend", "NO")
    parts = (module for model in run.models for module in model.modules())
    return str(getattr(backend, "value", backend)).upper() != "NO" or any(hasattr(part, "_orig_mod") for part in parts)


def _why_not_mixed(run: DryRun) -> str:
    if run.precision != "32-true":
        return "the precision was chosen by the user and stays"
    if precision_option(run) is not None:
        return ""
    if run.precision_given:
        return "the script passes its own mixed_precision to the Accelerator, and that wins"
    if run.precision_read:
        return (
            "the script asks accelerator.mixed_precision and acts on the answer before it trains; pass "
            "--mixed_precision to see what it does then"
        )
    return ""


def _about_slices(run: DryRun, facts: Facts) -> list[str]:
    models = [module for model in run.models for module in model.modules()]
    notes = _about_batch_norm(run, "slice")
    if not facts.inside:
        notes.append("the script computes its loss outside the model: slices run their forward twice")
    if any("Dropout" in type(module).__name__ and getattr(module, "p", 0) for module in models):
        notes.append("dropout draws other random numbers for slices; the result is as random as before")
    return notes


def _about_batch_norm(run: DryRun, part: str) -> list[str]:
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = (module for model in run.models for module in model.modules())
    if any(isinstance(module, _BatchNorm) and module.training for module in modules):
        return [f"batch normalisation takes its statistics over the samples of a {part}"]
    return []
