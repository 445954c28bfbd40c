"""From a script at its first training batch to a plan: what is predicted, what would be changed, what may not be."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from vram_guard.budget import Budget
from vram_guard.budget.host import host_share
from vram_guard.errors import VramGuardError
from vram_guard.guard.refusals import Refusal, before_the_process, beside_layout
from vram_guard.guard.settling import planned, settled
from vram_guard.job import Job, JobRun
from vram_guard.language import _
from vram_guard.parallel.spec import data_parallel
from vram_guard.plan import Plan
from vram_guard.plan.layout_facts import less_nccl, links_of
from vram_guard.plan.source import Explored, Source
from vram_guard.plan.techniques import FORMS, TECHNIQUES, mixed_precision, splits_of
from vram_guard.proof.effects import compared_while_training, other_draws_of_slices
from vram_guard.proof.prove import Disproof, Proof
from vram_guard.proof.small_steps import SmallSteps, small_steps
from vram_guard.report.as_json import as_dict
from vram_guard.report.html import html_report
from vram_guard.report.text import render
from vram_guard.techniques import Body, Recipe, find_blocks
from vram_guard.tensors import without_modes
from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate._settings import ELSEWHERE, NOT_HERE, LaunchSettings
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.forked_traces import ForkedTraces
from vram_guard_accelerate.dry_run.results import LoopFacts
from vram_guard_accelerate.launch_plan import BEFORE_START, LaunchPlan, LoaderPlace, option_words
from vram_guard_accelerate.planning.requests import DryRunAnswer

if TYPE_CHECKING:
    import torch


def decide(first: FirstBatch, settings: LaunchSettings, budget: Budget, title: str) -> DryRunAnswer:
    """Plan for the script that stands at its first training batch.

    Args:
        first: the script.
        settings: what may be changed.
        budget: for each process.
        title: of the page.

    Raises:
        UnsupportedStepError: the script cannot be followed; the message says where and why.
    """
    traces, layout = ForkedTraces(first), data_parallel(first.shape.ranks) if first.shape.ranks > 1 else None
    budget = less_nccl(budget, layout, links_of(layout, budget))  # its processes have not talked yet
    try:
        return _decided(first, traces, settings, budget, title)
    except VramGuardError:
        if not traces.fails_at_others:
            raise
    # As written it has been followed: a script may take no other batch sizes than its own.
    only = replace(first, fails_at_others=traces.fails_at_others)
    return _decided(only, traces, settings, budget, title)


def _decided(
    first: FirstBatch, traces: ForkedTraces, settings: LaunchSettings, budget: Budget, title: str
) -> DryRunAnswer:
    facts = traces.first_trace().facts
    refused = dict(_refused(first, facts))
    script = _Script(first, settings, budget, traces, facts)
    made, proof = settled(script, refused)
    launch_plan = _launch_plan(made, first)
    notes = [*first.sample.notes, *_notes(script, refused, made), *proof.notes]
    told = _only_told(first, launch_plan)
    notes += [_("this plan is only told, and not carried out: {reason}", reason=told)] if told else []
    return DryRunAnswer(
        plan=as_dict(made),
        text=render(made),
        brief=render(made, verbose=False),
        page=html_report(made, title=title),
        launch_plan=launch_plan,
        notes=tuple(dict.fromkeys(notes)),
        fits=made.fits,
        changed=made.changed,
        only_told=told,
        own_options=_own_options(script, made),
    )


def _own_options(script: _Script, made: Plan) -> tuple[str, ...]:
    """What the script's own options for smaller batches would be, where nothing that the guard does fits."""
    first, facts = script.first, script.facts
    batch, accumulation = first.batch_size_option, first.script.options.accumulation(facts.batches_per_step)
    if made.fits or first.why_one_size or not (batch and accumulation and script.settings.asks("accumulate")):
        return ()
    size, written = first.sample.batch_size, made.timeline_before
    for count in splits_of(size):
        if written is not None and written.at(size // count).peak_reserved <= script.budget.usable:
            return tuple(option_words((batch, size // count), (accumulation, facts.batches_per_step * count)))
    return ()


@dataclass
class _Script:
    """A script, as it is decided for (:class:`~vram_guard.guard.settling.PlannedTraining`)."""

    first: FirstBatch
    settings: LaunchSettings
    budget: Budget
    traces: ForkedTraces
    facts: LoopFacts
    body: Body | None = None
    """The module that may run over slices of a batch; None: none is known."""
    random: bool = False
    """True if it draws random numbers."""
    explored: dict[Hashable, Explored] = field(default_factory=dict)
    """What its plans have found out, for those that follow."""

    def objections(self, plan: Plan) -> Iterable[Refusal | None]:  # noqa: ARG002 - copies that fail say what fails
        return ()

    def finds_body(self, refused: dict[str, str]) -> bool:
        if self.body is not None or "slices" not in self.settings.techniques:
            return False
        try:
            found = self.traces.body()
        except VramGuardError as error:
            refused["slices"] = str(error)
            return False
        self.body, self.random = found.body, found.random
        return True

    def prove(self, plan: Plan, refused: dict[str, str]) -> Proof | Disproof:  # noqa: ARG002 - nothing else rests on it
        steps = _small_steps(self.first, plan.recipe)
        if steps is not None and steps.refutation:
            return Disproof(FORMS[plan.recipe.optimizer], steps.refutation)
        return Proof("", notes=() if steps is None else (steps.words(),))

    def plan(self, refused: Mapping[str, str]) -> Plan:
        first, settings = self.first, self.settings
        source = Source(
            model=first.root,
            trace=self.traces.trace,
            precision=first.precision,
            accumulate=self.facts.batches_per_step,
            ranks=first.shape.ranks,
            one_size=bool(first.why_one_size),
            compiles=first.compiles,
            copies=True,
            body=self.body,
            explored=self.explored,
            job=Job(_nothing) if settings.whole_job and first.sample.loader is not None else None,
            whole=lambda _job: self.traces.whole_job,
        )
        return planned(
            source,
            first.sample.batch_size,
            self.budget,
            settings,
            refused=refused,
            host_budget=host_share(settings.host_budget, first.shape.local_ranks),
            dataset_size=first.sample.dataset_size,
        )


#: What a plan says of itself, where it would help.
_SAID_BY_PLANS = ("accumulate", "evaluation", "slices")


def _notes(script: _Script, refused: Mapping[str, str], made: Plan) -> Iterator[str]:
    """What is refused, and what the plan changes beside memory."""
    if why := script.first.script.resuming_not_followed:
        yield _("what resuming takes is not included: load_state was not followed ({why})", why=why)
    if 2 * script.traces.kept_outputs > made.estimate.peak_allocated:
        yield _(
            "most of the peak is outputs of an evaluation, which the Trainer keeps on the GPU until its last batch; "
            "its argument eval_accumulation_steps moves them to host memory after so many batches"
        )
    for name, why in refused.items():
        if script.settings.asks(name) and name not in _SAID_BY_PLANS:
            yield Refusal(name, why).words()
    if made.recipe.slices is not None and script.random:
        yield other_draws_of_slices()
    if made.recipe.checkpoint or made.recipe.slices is not None:
        yield compared_while_training()
    if not made.fits and not script.first.by_itself:
        yield _(ELSEWHERE)


def _launch_plan(made: Plan, first: FirstBatch) -> LaunchPlan:
    """The changes that a plan means for the script that it was made for."""
    mixed = made.precision != made.precision_before
    script = first.script
    return LaunchPlan(
        precision=ACCELERATES[made.precision] if mixed else "",
        batch_size=made.batch_size_before,
        grown_batch_size=made.batch_size,
        # Where the script scales by that option too, rates would be scaled twice: the loader is made larger.
        batch_option=first.batch_size_option if _grows(made) and not script.options.scales_rates else "",
        loader=first.loader_place or LoaderPlace(),
        learning_rate_factor=made.learning_rate_factor,
        models=len(first.models),
        by_itself=first.by_itself,
        recipe=made.recipe,
    )


def _only_told(first: FirstBatch, plan: LaunchPlan) -> str:
    """The reason why a script without Accelerate cannot be changed inside; "" where it can, or need not be."""
    if not first.by_itself or not plan.within:
        return ""
    if len(first.models) > 1:
        return _("the script trains several models without Accelerate, whose order may be another one in its real run")
    if first.compiled:
        return _("the script compiles its model, and what the compiler makes of the plan was not proven")
    return first.fails_at_others


def _grows(made: Plan) -> bool:
    return made.batch_size != made.batch_size_before


def _small_steps(first: FirstBatch, recipe: Recipe) -> SmallSteps | None:
    """Of the prepared optimizer that differs most; None where the recipe leaves them as they are."""
    found = []
    for one in first.accelerator._optimizers:  # noqa: SLF001 - see private_api.py
        inner: torch.optim.Optimizer = getattr(one, "optimizer", one)
        with without_modes():
            found.append(small_steps(partial(_itself, inner), recipe))
    return max((one for one in found if one), key=lambda one: (one.why_not, one.difference), default=None)


def _nothing(_run: JobRun) -> None:
    """The script itself does what its job is: nothing is left to be played."""


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


# --- what cannot be done ----------------------------------------------------------------------------------------


def _refused(first: FirstBatch, facts: LoopFacts) -> Iterator[tuple[str, str]]:
    """Techniques that cannot be applied to this script, each with the reason."""
    clips = _("the script clips gradients, which a fused optimizer unscales itself")
    reasons = {
        **{name: _(why) for name, why in NOT_HERE.items()},
        "expandable_segments": "" if os.environ.get(BEFORE_START) == "1" else before_the_process(),
        "precision": _why_not_mixed(first),
        "grow": _why_not_grown(first),
        "fused": clips if facts.clips_gradients else "",
        "offload_activations": next(iter(facts.own_backward), ""),
        "slices": _why_not_sliced(first),
    }
    if first.by_itself:
        reasons["grow"] = _("the script trains without Accelerate, which would do it")
    if first.process is not None:
        reasons |= _beside_shards(first, first.process.fsdp_version)
    return ((name, reason) for name, reason in reasons.items() if reason)


def _beside_shards(first: FirstBatch, fsdp_version: int | None) -> dict[str, str]:
    """The techniques that cannot be put on a model which Accelerate has divided."""
    if fsdp_version is None:
        divides = _("DeepSpeed's engine trains the model, and divides it as it is launched")
        return {name: divides for name in TECHNIQUES if name not in ("grow", "checkpoint")}
    # A name that leads through a wrapper of FSDP1 is not there in a model that is not divided yet.
    nested = any("_fsdp_wrapped_module" in block.name for block in find_blocks(first.root))
    return dict(beside_layout(f"FSDP{fsdp_version}", *(() if nested else ("checkpoint",))))


def _why_not_grown(first: FirstBatch) -> str:
    why = first.fails_at_others or first.sample.growable
    if why or first.batch_size_option or first.loader_place is not None:
        return why
    return _(
        "the script makes no loader with the training's batch size (it gives it a batch sampler, or a library does)"
    )


def _why_not_sliced(first: FirstBatch) -> str:
    if first.compiled:
        return _("a model that torch.compile compiles as a whole is not cut open")
    return first.why_one_size


def _why_not_mixed(first: FirstBatch) -> str:
    if first.by_itself:
        return _("the script trains without Accelerate, which would do it; what it casts by itself stays as it is")
    if first.precision != "32-true":
        return _("the training is in {precision} already, and stays so", precision=first.precision)
    script, (name, _why) = first.script, mixed_precision(first.precision, first.shape.capability)
    if name is not None and (script.precision_option or script.by_trainer or script.reads_precision):
        option = script.precision_option or "--mixed_precision"
        return _(
            "the script chooses what it does in another precision; launch it with {options} to see what it takes then",
            options=f"{option} {ACCELERATES[name]}",
        )
    if script.precision_given and not script.by_trainer:
        return _("the script passes its own mixed_precision to the Accelerator, which takes precedence")
    return ""
