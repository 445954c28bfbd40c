"""Plan: what to change in a training step so that it fits into a budget, and nothing more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from vram_guard.plain_model import as_step
from vram_guard.plan._request import (
    PlanRequest,
    check_not_planned,
    checked_correction,
)
from vram_guard.plan.checks import check_unit
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.options import PlanOptions
from vram_guard.plan.pins import Pins
from vram_guard.plan.source import Source, source_of
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques, compute_capability
from vram_guard.state.collector import collector_paused
from vram_guard.step import TrainingStep, checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from vram_guard.budget import GPU, Budget
    from vram_guard.parallel.links import Topology
    from vram_guard.plan.gpus_request import GpusRequest

__all__ = ["DEFAULT_ALLOW", "Pins", "Plan", "PlanOptions", "Rejected", "Source", "plan"]

USUAL = PlanOptions()


@collector_paused()  # the collector looks at millions of values of traces and timelines, of which none is in a cycle
def plan(
    step: TrainingStep | Source | nn.Module | Callable[[], nn.Module],
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = DEFAULT_ALLOW,
    pin: Mapping[str, Any] | Pins | None = None,
    grow: bool = False,
    gpus: int | Literal["auto"] | None = None,
    input_shape: str | int | Sequence[Any] | None = None,
    options: PlanOptions = USUAL,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The cheapest change that makes the step fit, or, with ``grow``, the largest batch within the target.

    A step that fits as written is left as it is.

    Args:
        step: the training step as written; or its :class:`~vram_guard.plan.source.Source`, where an external
            loop is followed.
        batch_size: samples that the loader delivers at once, on one process.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name or by its size ("24GB"); with neither, this machine's device.
        margin: the share of the budget to leave free; None: the default.
        allow: what may be changed, see :data:`vram_guard.plan.techniques.TECHNIQUES`; "offload" is every kind of it.
        pin: parts of the plan that are fixed, see :class:`Pins`: ``{"micro_batch_size": 4, "checkpoint": "all"}``.
        grow: where the step fits, enlarge the batch (whole multiples of it, everything else as written) and give the
            factor for the learning rate.
        gpus: spread the training over so many GPUs, the cheapest way that fits; each loads ``batch_size`` samples at
            once, and what they take together for an optimizer step stays under every plan. "auto": as few GPUs as
            suffice; ``batch_size`` is then what all of them load together.
        input_shape: where ``step`` is a plain model, the shape of one sample, as in :func:`vram_guard.simulate.trace`.
        options: everything else, see :class:`PlanOptions`.
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
    from vram_guard.plan.gpus_request import check_step, requested_gpus
    from vram_guard.simulate.compiled import allowed_seconds
    from vram_guard.simulate.operators.cudnn_choice import checked_choice

    batch_size = checked_count("batch_size", batch_size)
    step = cast("TrainingStep | Source", as_step(step, input_shape))
    allowed, pins = checked_techniques(allow), Pins.of(pin)
    grow = grow and "grow" not in options.refused
    check_not_planned(step)
    check_unit(budget)
    correction, cudnn = checked_correction(options.correction), checked_choice(options.cudnn)
    over = requested_gpus(step, gpus, options.node, options.link, options.layouts)
    if over is not None:
        step = check_step(step, over, grow=grow)
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    if over is not None:
        over.check_card(resolved.gpu)
    asked = PlanRequest(
        batch_size=batch_size,
        budget=resolved,
        capability=compute_capability(resolved),
        allowed=allowed,
        refused=options.refused,
        pins=pins,
        blocks=None if options.blocks is None else tuple(options.blocks),
        host_budget=options.host_budget,
        link=options.link,
        grow=grow,
        target_utilization=options.target_utilization,
        lr_rule=options.lr_rule,
        dataset_size=options.dataset_size,
        settings=options.settings,
        correction=correction,
        cudnn=cudnn,
        compile_seconds=allowed_seconds(),
        progress=progress or _silent,
    )
    _check_pins(asked, step)
    if over is not None:
        return _spread_over(over, cast("TrainingStep", step), asked)
    return _planned(asked, step)


def _check_pins(asked: PlanRequest, step: TrainingStep | Source) -> None:
    trains = step.trains if isinstance(step, Source) else step.optimizer is not None
    asked.pins.check(asked.batch_size, asked.capability, grow=asked.grow, trains=trains)


def _planned(asked: PlanRequest, step: TrainingStep | Source) -> Plan:
    """The plan on the GPUs that the step has."""
    from vram_guard.plan._of_source import plan_of_source
    from vram_guard.plan.layout_facts import budget_of_rank

    if isinstance(step, Source):
        source = step
    else:
        blocks = asked.blocks if asked.may_checkpoint else ()
        source = deep_source(step, asked.budget, blocks, asked.pins, asked.link)
    return plan_of_source(replace(asked, budget=budget_of_rank(asked.budget, source.layout, asked.link)), source)


def import_planning() -> None:
    """Import what plans need, in a process that is copied for each: modules that a copy imports end with it."""
    from vram_guard.plan import _few_blocks, _of_source  # noqa: F401
    from vram_guard.simulate.tracing import run  # noqa: F401


def deep_source(
    step: TrainingStep,
    budget: Budget,
    blocks: Iterable[str] | None,
    pins: Pins,
    link: str | Topology | None = None,
) -> Source:
    """A TrainingStep as :func:`plan` follows it; a model of many equal blocks by a few of them where that suffices.

    Args:
        step: as written.
        budget: whose card traces are made for.
        blocks: that may be checkpointed, and are watched for what they change; None: repeated modules are found.
        pins: parts of the plans that are fixed.
        link: what connects the GPUs of a step that is divided over several; None: what is usual for the card.
    """
    from vram_guard.plan._few_blocks import with_few_blocks
    from vram_guard.plan._purity import watched_modules
    from vram_guard.plan.layout_facts import links_of
    from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY

    links = links_of(step.layout, budget, link) if step.parallel is not None else None
    capability = compute_capability(budget) or ASSUMED_COMPUTE_CAPABILITY
    return with_few_blocks(source_of(step, capability, watched_modules(blocks, pins), links))


def _spread_over(over: GpusRequest, step: TrainingStep, asked: PlanRequest) -> Plan:
    """The plan over several GPUs; its model is built once for all layouts."""
    from vram_guard.plan._of_source import plan_of_source
    from vram_guard.plan.layouts import ModelSize
    from vram_guard.plan.over_gpus import SpreadSearch
    from vram_guard.simulate.tracing.run import with_built_model

    def source_for(one: TrainingStep, links: Topology | None) -> Source:
        return source_of(one, asked.assumed_capability, asked.watched, links)

    def plan_source(one: Source, size: int, budget: Budget, techniques: frozenset[str]) -> Plan:
        inner = replace(
            asked, batch_size=size, budget=budget, allowed=techniques, capability=compute_capability(budget)
        )
        _check_pins(inner, one)
        return plan_of_source(inner, one)

    built = with_built_model(step, asked.assumed_capability)
    size = ModelSize.of(built.model)  # type: ignore[arg-type]
    search = SpreadSearch(over, built, asked.budget, source_for, plan_source, asked.allowed, size, asked.progress)
    try:
        return search.planned(asked.batch_size)
    finally:
        for source in search.sources.values():
            source.forget()


def _silent(_line: str) -> None:
    """The progress of those who asked for none."""
