"""From a script at its first training batch to a plan: what is predicted, what would be changed, what may not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.apply.microbatch import CannotSplitError, telling_example
from vram_guard.errors import UnsupportedStepError
from vram_guard.plan.words import not_possible
from vram_guard.step import TrainingStep
from vram_guard_accelerate.orders import Orders
from vram_guard_accelerate.sharded_notes import about_sharding, why_not_sharded

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard_accelerate.answers import Facts
    from vram_guard_accelerate.dry_run import DryRun
    from vram_guard_accelerate.settings import Settings


@dataclass(frozen=True)
class Decision:
    """A plan for a script."""

    plan: Plan
    orders: Orders
    """What the processes of the real launch are to do."""
    notes: tuple[str, ...]
    """What a reader of the prediction should know, and what was refused for which reason."""


def decide(run: DryRun, settings: Settings, budget: Budget) -> Decision:
    """Plan for the script that stands at its first training batch.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why.
    """
    from vram_guard.plan import plan

    assert run.sample is not None
    written = _as_written(run)
    facts = run.first_look(written)
    step = written.with_(accumulate=facts.batches_per_step, forward_again=not facts.inside)
    refused = _refused(run, facts)
    made = plan(
        step,
        run.sample.batch_size,
        budget,
        allow=settings.techniques - refused.keys(),
        host_budget=settings.host_budget,
        grow=settings.grow and "grow" not in refused,
        target_utilization=settings.target_utilization,
        lr_rule=settings.lr_rule,
        dataset_size=run.sample.dataset_size,
    )
    notes = [*run.sample.notes, *run.notes, *settings.refused]
    notes += [not_possible(name, why) for name, why in refused.items() if _asked(name, settings)]
    if run.why_not_sliced and made.splits == 1:
        notes.append(not_possible("accumulate", run.why_not_sliced))
    if made.splits > 1:
        notes += _about_slices(run, facts)
    notes += about_sharding(run, made)
    return Decision(made, Orders.of(made, run), tuple(notes))


def _asked(name: str, settings: Settings) -> bool:
    return settings.grow if name == "grow" else name in settings.allow


def _as_written(run: DryRun) -> TrainingStep:
    assert run.sample is not None
    return TrainingStep(
        model=run.root,
        batch=run.sample.make,
        loss=_unused,
        optimizer=_unused,
        precision=run.precision,  # type: ignore[arg-type]
        data_parallel_ranks=run.ranks,
        runner=run.trace,
        shards=run.standby is not None,
    )


def _unused(*_args: Any) -> Any:
    raise AssertionError("a script's loop is run by the script")


def _refused(run: DryRun, facts: Facts) -> dict[str, str]:
    """Technique -> why it cannot be applied to this script."""
    reasons = {
        "offload_parameters": why_not_sharded(run, compiled=_compiled(run)),
        "accumulate": _why_not_sliced(run, facts),
        "precision": _why_not_mixed(run),
        "grow": run.sample.growable if run.sample is not None else "",
        "fused": "the script clips gradients, which a fused optimizer unscales itself" if facts.clips else "",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _why_not_sliced(run: DryRun, facts: Facts) -> str:
    if facts.foreign:
        return "an optimizer updates parameters of a model that was not handed to Accelerator.prepare"
    if _compiled(run):
        return "a model that torch.compile compiles as a whole is not cut open"
    assert run.sample is not None
    try:
        telling_example(run.sample.make)
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
    if exposed_precision(run) is not None:
        return ""
    if run.precision_given:
        return "the script passes its own mixed_precision to the Accelerator, and that wins"
    if run.precision_read:
        return (
            "the script asks accelerator.mixed_precision and acts on the answer before it trains; pass "
            "--mixed_precision to see what it does then"
        )
    return ""


def exposed_precision(run: DryRun) -> str | None:
    """The script's own option for mixed precision, where it takes Accelerate's words; None where there is none."""
    known = run.options.get("mixed_precision")
    if known is None or str(known["value"] or "") != run.precision_given or not run.precision_given:
        return None
    return str(known["option"])


#: Options by which scripts let their users choose the samples of one process's batch.
BATCH_SIZE_OPTIONS = ("per_device_train_batch_size", "train_batch_size", "batch_size")


def exposed_batch_size(run: DryRun) -> str:
    """The script's own option for the batch size, where its value is what the loader delivers; "" where none is."""
    assert run.sample is not None
    for name in BATCH_SIZE_OPTIONS:
        known = run.options.get(name)
        if known is not None and known["value"] == run.sample.batch_size:
            return str(known["option"])
    return ""


def _about_slices(run: DryRun, facts: Facts) -> list[str]:
    import torch

    notes = []
    models = [module for model in run.models for module in model.modules()]
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training for module in models):  # noqa: SLF001
        notes.append("batch normalisation takes its statistics over the samples of a slice")
    if not facts.inside:
        notes.append("the script computes its loss outside the model: slices run their forward twice")
    if any("Dropout" in type(module).__name__ and getattr(module, "p", 0) for module in models):
        notes.append("dropout draws other random numbers for slices; the result is as random as before")
    return notes
