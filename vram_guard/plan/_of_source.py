"""The plan for one source of timelines: what may be chosen, the search, and what is followed afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vram_guard.budget.host import host_share
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import Message, _
from vram_guard.parallel.spec import data_parallel
from vram_guard.plan._compiled import with_compiled
from vram_guard.plan._cost_model import CostModel
from vram_guard.plan._option import Option
from vram_guard.plan._purity import check_pinned_blocks, why_not_checkpointed
from vram_guard.plan._request import PlanRequest, environment_settings
from vram_guard.plan._search import search
from vram_guard.plan._space import parts_of, space_of
from vram_guard.plan._whole_job import smaller_evaluation, whole_job, with_whole_job
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.descriptions import refused as refused_reason
from vram_guard.plan.layout_facts import links_of
from vram_guard.plan.model import Plan
from vram_guard.plan.search_space import Candidates, Request
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques, half_precision, mixed_precision
from vram_guard.plan.tracing import Traces
from vram_guard.simulate.compiled import EAGER, Compiler
from vram_guard.simulate.operators.cudnn_choice import under
from vram_guard.techniques.compatibility import incompatible
from vram_guard.techniques.recipe import Recipe, Sharding
from vram_guard.timeline import Timeline
from vram_guard.torch_release import torch_release

#: What is not planned where a training is spread over several GPUs: the layouts have their own ways for it.
_NOT_SPREAD = frozenset(
    {
        *("offload_frozen", "offload_optimizer", "offload_parameters", "8bit", "optimizer_in_backward"),
        *("chunked_loss", "selective_checkpoint"),
    }
)


#: Some block that keeps some results.
_KEEPING = Recipe(checkpoint=("",), checkpoint_keeps=("mm",))


class _Explored(NamedTuple):
    """What is known of a source at one batch size."""

    traces: Traces
    costs: CostModel
    candidates: Candidates
    followed: Traces | None
    """Of the whole job, where it is followed afterwards."""

    def forget(self) -> None:
        """Let go of its timelines."""
        self.traces.forget()
        if self.followed is not None:
            self.followed.forget()


def plan_of_source(asked: PlanRequest, source: Source) -> Plan:
    """The plan for a training on the GPUs that it has.

    Args:
        asked: what was asked, checked.
        source: of the step as written.

    Raises:
        InvalidInputError: what is pinned does not go with the step.
        UnsupportedStepError: the step cannot be run symbolically.
    """
    source, whole = _with_job(asked, source)
    # Before the first backward pass, after which autograd may not be copied any more.
    follows = source.thorough and _may_compile(source)
    compiler = Compiler(whole.trace, asked.compile_seconds, copies=not source.copies) if follows else None
    try:
        explored, shardings = _explored(asked, source, whole)
    except Exception:
        if whole is source:
            raise
        source = whole  # steps that need what is made as the training begins: an iterator of a hook's
        explored, shardings = _explored(asked, source, whole)
    try:
        return _plan_of(asked, source, whole, explored, shardings, compiler)
    finally:
        if source.explored is None:
            explored.forget()


def _plan_of(
    asked: PlanRequest,
    source: Source,
    whole: Source,
    explored: _Explored,
    shardings: tuple[Sharding, ...],
    compiler: Compiler[TraceRequest] | None,
) -> Plan:
    request = _request(asked, source, explored, shardings)

    def searched(wanted: Request) -> Plan:
        made = search(wanted, explored.traces, explored.costs, asked.progress, explored.candidates)
        return made if explored.followed is None else _followed_to_its_end(asked, made, wanted, whole, explored)

    made = searched(request)
    if compiler is None or all(note.said != EAGER for note in (*made.before.notes, *made.estimate.notes)):
        return made
    return with_compiled(made, request, whole, searched, compiler, asked.progress)


def _with_job(asked: PlanRequest, source: Source) -> tuple[Source, Source]:
    """The source of the first steps, and that of the whole job; both the same where there is no job."""

    def asking(follow: Callable[[TraceRequest], Timeline] | None) -> Callable[[TraceRequest], Timeline] | None:
        return None if follow is None else under(asked.cudnn, follow)

    first = replace(
        source,
        trace=under(asked.cudnn, source.trace),
        shallow=asking(source.shallow),
    )
    if source.job is None or source.whole is None:
        return first, first
    job = whole_job(source.job, source.whole, asked.batch_size * source.batch_slices)
    return first, replace(first, trace=under(asked.cudnn, job), shallow=None, stacks=(), marks=False)


def _followed_to_its_end(asked: PlanRequest, made: Plan, request: Request, whole: Source, known: _Explored) -> Plan:
    """The plan with its whole job, whose evaluation may get smaller batches."""
    assert known.followed is not None
    smaller = smaller_evaluation(whole, request, lambda run: under(asked.cudnn, run))
    why_not = None
    if "evaluation" not in _techniques(asked, whole):
        why_not = asked.refused.get("evaluation") or Message(
            "{name} is not among the techniques that this plan may use", name="'evaluation'"
        )
    return with_whole_job(made, request, known.followed, known.costs, smaller, why_not, asked.progress)


def _explored(asked: PlanRequest, source: Source, whole: Source) -> tuple[_Explored, tuple[Sharding, ...]]:
    """What is known of the source, and the other ways to divide it that may be taken."""
    key = asked.batch_size, source is whole
    earlier = None if source.explored is None else source.explored.get(key)
    known = earlier if isinstance(earlier, _Explored) else None
    traces = known.traces if known else Traces(source, asked.batch_size, asked.progress, asked.budget)
    traces(Option(source.precision, 1))  # errors of the step as written come before all others
    shardings: tuple[Sharding, ...] = ()
    if source.shardings is not None:
        shardings = tuple(way for way in source.shardings() if way.techniques <= asked.techniques)
    if known is None:
        undivided = shardings and source.topology is None
        links = links_of(data_parallel(source.ranks), asked.budget, asked.link) if undivided else None
        costs = CostModel(source, traces, asked.batch_size, asked.budget.gpu, links)
        followed = None if whole is source else Traces(whole, asked.batch_size, asked.progress, asked.budget)
        known = _Explored(traces, costs, {}, followed)
        if source.explored is not None:
            source.explored[key] = known
    return known, shardings


def _request(asked: PlanRequest, source: Source, explored: _Explored, shardings: tuple[Sharding, ...]) -> Request:
    """The question to the search."""
    techniques, reasons = _techniques(asked, source), asked.reasons
    written = explored.traces(Option(source.precision, 1))
    changes = written.changes
    impure = frozenset(change.module for change in changes)
    parts = parts_of(source.model, explored.costs, asked.blocks, impure, source.body)
    explored.traces.compose_with(set(parts.checkpointable).intersection(parts.saving), parts.saving)
    check_pinned_blocks(asked.pins, parts.blocks, changes)
    may_choose = "checkpoint" in techniques and asked.pins.checkpoint is None
    # A step that could not be followed does not say what its blocks keep.
    no_blocks = may_choose and bool(written.work) and not parts.saving
    refusal = _no_selective_checkpointing(source)
    if refusal and asked.pins.checkpoint_keeps:
        raise UnsupportedStepError(_("{pin} is pinned, but {refusal}", pin="checkpoint_keeps", refusal=refusal))
    precisions, why_precision = _precisions(asked, source.precision)
    return Request(
        batch_size=asked.batch_size,
        precision=source.precision,
        budget=asked.budget,
        space=space_of(
            asked.batch_size,
            precisions,
            techniques,
            parts,
            asked.pins,
            trains=source.trains,
            backward=any(phase.name == "backward" for phase in written.phases),
            shardings=shardings,
            incompatible=_incompatible(source),
        ),
        why_precision=reasons.get("precision", why_precision),
        why_not_split=reasons.get("accumulate", _why_not_split(asked, trains=source.trains)),
        why_not_checkpointed=why_not_checkpointed(changes) if asked.may_checkpoint else (),
        why_no_blocks=(Reason(Why.NO_BLOCKS),) if no_blocks else (),
        left_out=_left_out(asked, source),
        accumulate=source.accumulate,
        ranks=source.ranks,
        grow=asked.grow,
        target_utilization=asked.target_utilization,
        lr_rule=asked.lr_rule,
        dataset_size=asked.dataset_size,
        settings=environment_settings() if asked.settings is None else asked.settings,
        dearest=None if source.most_seconds is None else source.most_seconds / explored.costs.written.seconds,
        host_usable=_host_usable(asked, source),
        correction=asked.correction,
        thorough=source.thorough,
    )


def _techniques(asked: PlanRequest, source: Source) -> frozenset[str]:
    """The techniques that this source's plan may take."""
    left = asked.techniques - _not_spread(source)
    return left - {"selective_checkpoint"} if _no_selective_checkpointing(source) else left


def _no_selective_checkpointing(source: Source) -> str:
    return incompatible(_KEEPING, compiled=source.compiles, torch_version=torch_release())


def _not_spread(source: Source) -> frozenset[str]:
    """The techniques that are not planned because several GPUs train."""
    return frozenset() if source.topology is None else _NOT_SPREAD


def _left_out(asked: PlanRequest, source: Source) -> tuple[Reason, ...]:
    """The reasons why techniques that were asked for by name are not planned."""
    left_out = asked.techniques - _techniques(asked, source) - checked_techniques(DEFAULT_ALLOW)
    spread, refusal = Message("it is not planned over several GPUs"), _no_selective_checkpointing(source)
    not_spread = _not_spread(source)
    return tuple(refused_reason(name, spread if name in not_spread else refusal) for name in sorted(left_out))


def _host_usable(asked: PlanRequest, source: Source) -> int | None:
    """Bytes of host memory for this process; None: not known, not limited."""
    if source.topology is None:
        return host_share(asked.host_budget, 1)
    # The memory of this machine says nothing of the nodes that are planned for.
    return None if asked.host_budget is None else host_share(asked.host_budget, source.topology.node)


def _may_compile(source: Source) -> bool:
    """True if a step may run compiled code: its model's, or a loss's or optimizer's where the compiler is imported."""
    return source.compiles or source.copies or "torch._dynamo" in sys.modules


def _incompatible(source: Source) -> Callable[[Option], str]:
    def why(option: Option) -> str:
        return incompatible(
            option.recipe,
            clip=source.clips,
            precision=option.precision,
            ranks=source.ranks,
            accumulate=source.accumulate * option.splits,
            compiled=source.compiles,
            torch_version=torch_release(),
        )

    return why


def _precisions(asked: PlanRequest, precision: str) -> tuple[tuple[str, ...], Reason]:
    """The precisions to choose from, the step's own first, and why they are those."""
    mixed, why = None, Reason(Why.NOT_ALLOWED)
    if "precision" in asked.techniques or precision != "32-true":
        mixed, why = mixed_precision(precision, asked.capability)
    half = half_precision(precision, asked.capability) if "half" in asked.techniques else None
    if asked.pins.precision is not None:
        why = Reason(Why.PRECISION_PINNED)
    return tuple(name for name in (precision, mixed, half) if name is not None), why


def _why_not_split(asked: PlanRequest, *, trains: bool) -> Reason:
    """The reason why there are no smaller micro-batches, where there are none and nothing was refused."""
    if asked.pins.micro_batch_size is not None:
        return Reason(Why.SIZE_PINNED)
    return Reason(Why.NO_GRADIENTS if "accumulate" in asked.allowed and not trains else Why.NO_ACCUMULATION)
