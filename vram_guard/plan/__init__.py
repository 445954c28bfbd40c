"""Plan: what to change in a training step so that it fits into a budget, and nothing more."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError
from vram_guard.language import Message, _
from vram_guard.parallel.spec import data_parallel
from vram_guard.plain_model import as_step
from vram_guard.plan._option import Option
from vram_guard.plan._purity import check_pinned_blocks, watched_modules, why_not_again, why_not_checkpointed
from vram_guard.plan._search import search
from vram_guard.plan._whole_job import smaller_evaluation, whole_job, with_whole_job
from vram_guard.plan.checks import check_growth
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.descriptions import refused as refused_reason
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.pins import Pins
from vram_guard.plan.search_space import Request
from vram_guard.plan.source import Source, source_of
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques, half_precision, mixed_precision
from vram_guard.state.collector import collector_paused
from vram_guard.step import TrainingStep, checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.parallel.links import Topology
    from vram_guard.plan._cost_model import CostModel
    from vram_guard.plan.gpus_request import GpusRequest
    from vram_guard.plan.over_gpus import PlanSource
    from vram_guard.plan.search_space import Candidates
    from vram_guard.plan.tracing import Traces

__all__ = ["DEFAULT_ALLOW", "Pins", "Plan", "Rejected", "Source", "plan"]

#: What is not planned where a training is spread over several GPUs: the layouts have their own ways for it.
_NOT_SPREAD = frozenset(
    {"offload_frozen", "offload_optimizer", "offload_parameters", "8bit", "optimizer_in_backward", "chunked_loss"}
)

#: What is assumed of an unnamed GPU: Ampere, the oldest generation with bfloat16.
ASSUMED_COMPUTE_CAPABILITY = (8, 0)


class _Explored(NamedTuple):
    """What is known of a source at one batch size."""

    traces: Traces
    costs: CostModel
    candidates: Candidates


@collector_paused()  # the collector looks at millions of values of traces and timelines, of which none is in a cycle
def plan(
    step: TrainingStep | Source | nn.Module | Callable[[], nn.Module],
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    input_shape: str | Sequence[Any] | None = None,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = DEFAULT_ALLOW,
    refused: Mapping[str, object] | None = None,
    pin: Mapping[str, Any] | Pins | None = None,
    blocks: Iterable[str] | None = None,
    host_budget: str | int | None = None,
    grow: bool = False,
    target_utilization: float = 0.8,
    lr_rule: str = "linear",
    dataset_size: int | None = None,
    settings: AllocatorSettings | None = None,
    correction: float = 1.0,
    cudnn: str | None = None,
    gpus: int | Literal["auto"] | None = None,
    node: int | None = None,
    link: str | Topology | None = None,
    layouts: Iterable[str] | None = None,
    compare_gpus: Iterable[int] = (),
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The cheapest change that makes the step fit, or, with ``grow``, the largest batch within the target.

    A step that fits as written is left as it is.

    Args:
        step: the training step as written; or its :class:`~vram_guard.plan.source.Source`, where an external
            loop is followed.
        batch_size: samples that the loader delivers at once, on one process.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        input_shape: where ``step`` is a plain model, the shape of one sample, as in :func:`vram_guard.simulate.trace`.
        gpu: a whole card by name; with neither, this machine's device.
        margin: the share of the budget to leave free; None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`; "offload" is every kind of it.
        refused: technique, or "grow" -> why it cannot be applied to this training: left out, and the plan says so.
        pin: parts of the plan that are fixed, see :class:`Pins`: ``{"micro_batch_size": 4, "checkpoint": "all"}``.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        host_budget: host memory that techniques may take: "64GiB" or bytes; None: what is free here now.
        grow: where the step fits, enlarge the batch (whole multiples of it, everything else as written) and give the
            factor for the learning rate.
        target_utilization: the share of the memory that growth may fill, in (0, 1]; never beyond the budget.
        lr_rule: "linear", "sqrt", "none" or "auto" ("linear" for SGD, "sqrt" for Adam-like optimizers).
        dataset_size: samples of one epoch over all processes; growth leaves at least one optimizer step.
        settings: the allocator's settings; None: those of this process's environment (PYTORCH_CUDA_ALLOC_CONF), or
            PyTorch's defaults where it has none, or some that cannot be replayed.
        correction: what predicted peaks are multiplied by, at least 1, where earlier runs took more than predicted.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.simulate.trace`.
        gpus: spread the training over so many GPUs, the cheapest way that fits; each loads ``batch_size`` samples at
            once, and what they take together for an optimizer step stays under every plan. "auto": as few GPUs as
            suffice; ``batch_size`` is then what all of them load together.
        node: GPUs of a node; None: 8.
        link: what connects the GPUs of a node, and the nodes, such as "nvlink,ib400"; None: what is usual for the card.
        layouts: the ways to spread that are tried, see :data:`vram_guard.plan.layouts.LAYOUTS`; None: all.
        compare_gpus: other numbers of GPUs that are planned for the same training, as a table.
        progress: called with a line of text before each slow part.

    Returns:
        A Plan. Where nothing fits, ``fits`` is False and everything else is as written.

    Raises:
        InvalidInputError: an argument makes no sense, or two contradict each other; raised before anything is traced.
        NoDeviceError: no budget, no GPU name and no GPU here.
        UnsupportedStepError: the step cannot be run symbolically, or a block is pinned to be checkpointed whose forward
            must not run twice.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> for name, before, after in plan(step, 30000, "80MiB", allow=["accumulate"]).changes():
        ...     print(f"{name}: {before} -> {after}")
        micro-batch size: 30000 -> 15000
        micro-batches per optimizer step: 1 -> 2
    """
    from vram_guard.budget import Budget

    batch_size = checked_count("batch_size", batch_size)
    step = cast("TrainingStep | Source", as_step(step, input_shape))
    allowed, refused = checked_techniques(allow), refused or {}
    techniques = frozenset(allowed - refused.keys())
    reasons = {name: refused_reason(name, why) for name, why in refused.items() if name in allowed}
    grow = grow and "grow" not in refused
    pins = Pins.of(pin)
    if isinstance(step, TrainingStep) and step.recipe:
        raise InvalidInputError(
            _("step.recipe is for traces; a plan makes its own: leave it out, and pin what is fixed")
        )
    check_growth(target_utilization, lr_rule)
    if dataset_size is not None:
        dataset_size = checked_count("dataset_size", dataset_size)
    correction = _checked_correction(correction)
    from vram_guard.budget.host import host_share
    from vram_guard.simulate.compiled import EAGER, Compiler, allowed_seconds
    from vram_guard.simulate.operators.cudnn_choice import checked_choice, under

    choice, seconds = checked_choice(cudnn), allowed_seconds()
    over = None
    if gpus is not None:
        from vram_guard.plan.gpus_request import GpusRequest, check_step

        over = GpusRequest.of(gpus, node, link, layouts, compare_gpus)
        step = check_step(step, over, grow=grow)
    elif layouts is not None or compare_gpus or (node is not None):
        raise InvalidInputError(_("node, layouts and compare_gpus are for plans over several GPUs: give gpus as well"))
    layout = step.parallel if isinstance(step, TrainingStep) else None
    if link is not None and over is None and layout is None:
        raise InvalidInputError(_("link is for plans over several GPUs: give gpus as well"))
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    from vram_guard.parallel.links import topology

    if over is not None:
        topology(link, gpus=over.node, node=over.node, gpu=resolved.gpu)  # which the card may not have
    capability = _compute_capability(resolved)
    trains = step.trains if isinstance(step, Source) else step.optimizer is not None
    pins.check(batch_size, capability, grow=grow, trains=trains)
    precisions, why_precision = _precisions(step.precision, techniques, capability)
    if pins.precision is not None:
        why_precision = Reason(Why.PRECISION_PINNED)

    from vram_guard.plan._cost_model import CostModel
    from vram_guard.plan._space import parts_of, space_of
    from vram_guard.plan.tracing import Traces

    report = progress or _silent
    named = None if blocks is None else tuple(blocks)
    may_checkpoint = "checkpoint" in techniques or pins.checkpoint not in (None, "none", 0, ())
    watched = watched_modules(named if may_checkpoint else (), pins)
    assumed = capability or ASSUMED_COMPUTE_CAPABILITY
    if over is not None:
        return _spread_over(
            over,
            step,
            batch_size,
            resolved,
            lambda one, wires: source_of(one, assumed, watched, wires),
            lambda one, size, amount, techniques: plan(
                one,
                size,
                amount,
                allow=techniques,
                refused=refused,
                pin=pins,
                blocks=named,
                host_budget=host_budget,
                settings=settings,
                correction=correction,
                cudnn=cudnn,
                progress=progress,
            ),
            allowed,
            report,
        )
    if isinstance(step, Source):
        source = step
    elif layout is not None:
        from vram_guard.parallel.outside import outside_allocator
        from vram_guard.plan.layout_facts import less_nccl

        links = topology(link, gpus=layout.gpus, node=layout.gpus_of_a_node, gpu=resolved.gpu)
        resolved = less_nccl(resolved, outside_allocator(layout, links))
        source = source_of(step, assumed, watched, links)
    else:
        source = source_of(step, assumed, watched)
    host_usable = host_share(host_budget, 1)
    may_divide = techniques
    if source.topology is not None:
        techniques -= _NOT_SPREAD
        # The memory of this machine says nothing of the nodes that are planned for.
        host_usable = None if host_budget is None else host_share(host_budget, source.topology.node)
    source = whole = replace(source, trace=under(choice, source.trace))
    if source.job is not None and source.whole is not None:
        job = whole_job(source.job, source.whole, batch_size * source.batch_slices)
        whole = replace(source, trace=under(choice, job))
    # Before the first backward pass, after which autograd may not be copied any more.
    compiler = Compiler(whole.trace, seconds, copies=not source.copies) if _may_compile(source) else None
    earlier = None if source.explored is None else source.explored.get(batch_size)
    known = earlier if isinstance(earlier, _Explored) else None
    traces = Traces(source, batch_size, report, resolved.multiprocessors) if known is None else known.traces
    # Errors of the step as written come before all others.
    changes = traces(Option(source.precision, 1)).changes
    shardings = [] if source.shardings is None else [s for s in source.shardings() if s.techniques <= may_divide]
    wires = None
    if shardings and source.topology is None:
        node = data_parallel(source.ranks).gpus_of_a_node
        wires = topology(link, gpus=source.ranks, node=node, gpu=resolved.gpu)
    cost_model = CostModel(source, traces, batch_size, resolved.gpu, wires) if known is None else known.costs
    parts = parts_of(source.model, cost_model, named, frozenset(change.module for change in changes))
    traces.compose_with(set(parts.checkpointable).intersection(parts.saving), parts.saving)
    check_pinned_blocks(pins, parts.blocks, changes)
    if source.forward_again and (again := why_not_again(changes)) is not None:
        techniques -= {"accumulate"}
        reasons["accumulate"] = refused_reason("accumulate", again)
    request = Request(
        batch_size=batch_size,
        precision=source.precision,
        budget=resolved,
        space=space_of(
            batch_size,
            precisions,
            techniques,
            parts,
            pins,
            trains=trains,
            shardings=shardings,
            incompatible=_incompatible(source),
        ),
        why_precision=reasons.get("precision", why_precision),
        why_not_split=reasons.get("accumulate", _why_not_split(pins, allowed=allowed, trains=trains)),
        why_not_checkpointed=why_not_checkpointed(changes) if may_checkpoint else (),
        accumulate=source.accumulate,
        ranks=source.ranks,
        grow=grow,
        target_utilization=target_utilization,
        lr_rule=lr_rule,
        dataset_size=dataset_size,
        settings=_environment_settings() if settings is None else settings,
        dearest=None if source.most_seconds is None else source.most_seconds / cost_model.written.seconds,
        host_usable=host_usable,
        correction=correction,
        thorough=source.thorough,
    )
    explored = known or _Explored(traces, cost_model, {})
    if source.explored is not None:
        source.explored[batch_size] = explored

    def searched(asked: Request) -> Plan:
        made = search(asked, traces, cost_model, report, explored.candidates)
        uneven = made.timeline_before is not None and made.timeline_before.retrace is not None
        made = replace(made, uneven=uneven)
        if whole is source:
            return made
        followed = Traces(whole, batch_size, report, resolved.multiprocessors)
        smaller = smaller_evaluation(whole, asked, lambda run: under(choice, run))
        why_not = None if "evaluation" in techniques else refused.get("evaluation") or Message("it is not allowed")
        return with_whole_job(made, asked, followed, cost_model, smaller, why_not, report)

    made = searched(request)
    if compiler is None or all(note.said != EAGER for note in (*made.before.notes, *made.estimate.notes)):
        return made
    from vram_guard.plan._compiled import with_compiled

    return with_compiled(made, request, whole, searched, compiler, report)


def _may_compile(source: Source) -> bool:
    """True if a step may run compiled code: its model's, or a loss's or optimizer's where the compiler is imported."""
    return source.compiles or source.copies or "torch._dynamo" in sys.modules


def _spread_over(
    over: GpusRequest,
    step: TrainingStep | Source,
    batch_size: int,
    budget: Budget,
    source_for: Callable[[TrainingStep, Topology | None], Source],
    plan_source: PlanSource,
    allowed: frozenset[str],
    report: Callable[[str], None],
) -> Plan:
    """The plan over several GPUs; its model is built once for all layouts."""
    from vram_guard.plan.layouts import ModelSize
    from vram_guard.plan.over_gpus import SpreadSearch
    from vram_guard.simulate.tracing.run import with_built_model

    assert isinstance(step, TrainingStep)
    built = with_built_model(step, budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY)
    size = ModelSize.of(built.model)  # type: ignore[arg-type]
    return SpreadSearch(over, built, budget, source_for, plan_source, allowed, size, report).planned(batch_size)


def _environment_settings() -> AllocatorSettings | None:
    """The allocator settings that the planned training will run under, as far as they can be replayed."""
    from vram_guard.allocator import AllocatorSettings

    try:
        return AllocatorSettings.from_environment()
    except InvalidInputError:
        return None


def _incompatible(source: Source) -> Callable[[Option], str]:
    from vram_guard.techniques.compatibility import incompatible

    def why(option: Option) -> str:
        if source.sliced_by == "model" and option.splits > 1 and option.recipe.parameters_on_host:
            # Slices take the gradients of parameters by themselves, which FSDP2 has replaced by then.
            return _("FSDP2 gathers a model's parameters once for its forward and backward, not for slices within it")
        return incompatible(
            option.recipe,
            clip=source.clips,
            precision=option.precision,
            ranks=source.ranks,
            sharded=source.sharded,
            accumulate=source.accumulate * option.splits,
        )

    return why


def _precisions(
    precision: str, techniques: frozenset[str], capability: tuple[int, int] | None
) -> tuple[tuple[str, ...], Reason]:
    """The precisions to choose from, the step's own first, and why they are those."""
    mixed, why = None, Reason(Why.NOT_ALLOWED)
    if "precision" in techniques:
        mixed, why = mixed_precision(precision, capability)
    half = half_precision(precision, capability) if "half" in techniques else None
    return tuple(name for name in (precision, mixed, half) if name is not None), why


def _why_not_split(pins: Pins, *, allowed: frozenset[str], trains: bool) -> Reason:
    """The reason why there are no smaller micro-batches, where there are none and nothing was refused."""
    if pins.micro_batch_size is not None:
        return Reason(Why.SIZE_PINNED)
    return Reason(Why.NO_GRADIENTS if "accumulate" in allowed and not trains else Why.NO_ACCUMULATION)


def _compute_capability(budget: Budget) -> tuple[int, int] | None:
    """The budget's GPU's; for a bare amount, that of this machine's device; None: no GPU is known."""
    from vram_guard.budget import Budget

    if budget.compute_capability is not None:
        return budget.compute_capability
    try:
        return Budget.resolve().compute_capability
    except (NoDeviceError, DeviceQueryError):
        return None


def _checked_correction(correction: object) -> float:
    if isinstance(correction, bool) or not isinstance(correction, int | float) or not 1 <= correction < 100:
        value = repr(correction)
        raise InvalidInputError(_("correction must be a factor of at least 1, such as 1.04, not {value}", value=value))
    return float(correction)


def _silent(_line: str) -> None:
    """The progress of those who asked for none."""
