"""A plan over several GPUs: every layout is planned as one GPU is, and the cheapest that fits is taken.

The training stays the one that was written: all GPUs together take the same samples for an optimizer step under every
layout. Where layers are divided over ``tensor`` GPUs, these take the batches of all of them, in micro-batches if need
be.

A layout is left out without a trace where the weights, gradients and optimizer states alone exceed the budget, and
without a search where it takes longer as it is than another one that fits already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import Message, _
from vram_guard.limits import MOST_GPUS
from vram_guard.parallel.links import Topology, topology
from vram_guard.parallel.outside import outside_allocator
from vram_guard.parallel.spec import Parallel
from vram_guard.plan._few_blocks import with_few_blocks
from vram_guard.plan._option import Option
from vram_guard.plan.communication import communication
from vram_guard.plan.descriptions import Reason, Why, longer
from vram_guard.plan.gpus_request import GpusRequest
from vram_guard.plan.layout_facts import (
    divides_layers,
    failure,
    less_nccl,
    remembered,
    seconds_of,
    shares,
    spread_reason,
    trial_order,
    why_not,
)
from vram_guard.plan.layouts import LayoutText, ModelSize, layouts_of
from vram_guard.plan.model import Plan
from vram_guard.plan.roofline import Communication
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.spread import LayoutPlan, Spread
from vram_guard.plan.step_time import card_of
from vram_guard.plan.techniques import OFFLOADS
from vram_guard.state.collector import collector_paused
from vram_guard.step import TrainingStep
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard.timeline import Timeline
from vram_guard.units import Amount

#: Layouts whose times differ by less are equal, and the simpler one is taken: the model is not that good.
TIME_STEP = 0.001

PlanSource = Callable[[Source, int, "Budget", "frozenset[str]"], Plan]


class SpreadPlan(NamedTuple):
    """The plan of a rank, and how the training lies on all of them."""

    rank: Plan
    spread: Spread


@dataclass
class SpreadSearch:
    """Plans layouts one by one, for one number of GPUs after the other.

    Attributes:
        request: what was asked.
        step: as written, with its model built.
        budget: of a GPU.
        source_for: a step with a layout -> its source.
        plan_source: (source, samples that a rank loads, budget, techniques) -> the plan of a rank.
        allowed: techniques that may be used.
        size: of the model.
        progress: called with a line of text before each slow part.
    """

    request: GpusRequest
    step: TrainingStep
    budget: Budget
    source_for: Callable[[TrainingStep, Topology | None], Source]
    plan_source: PlanSource
    allowed: frozenset[str]
    size: ModelSize
    progress: Callable[[str], None]
    sources: dict[Parallel | None, Source] = field(default_factory=dict)

    def planned(self, batch_size: int) -> Plan:
        """The plan that answers the request.

        Args:
            batch_size: samples that one GPU loads; with gpus="auto" those of all GPUs together.
        """
        if self.request.gpus == "auto":
            total = batch_size
            made = self._fewest(total)
        else:
            total = batch_size * self.request.gpus
            made = self.on(self.request.gpus, total)
        return replace(made.rank, spread=made.spread)

    def _layouts(self, gpus: int) -> list[Parallel | None]:
        return list(layouts_of(gpus, self.request.node, self.request.layouts, self.step.precision))

    # --- one number of GPUs ---------------------------------------------------------------------------------------

    def on(self, gpus: int, total: int) -> SpreadPlan:
        """The cheapest layout that fits on so many GPUs, for ``total`` samples loaded at once over all of them."""
        wires = self._topology(gpus)
        known = self._layouts(gpus)
        if not known:
            raise InvalidInputError(
                _(
                    "no layout of {layouts} can be put on {gpus} GPUs in nodes of {node}: hsdp needs several nodes, "
                    "and tensor nodes with an even number of GPUs; allow other layouts",
                    layouts=", ".join(self.request.layouts),
                    gpus=gpus,
                    node=min(gpus, self.request.node),
                )
            )
        layouts = [layout for layout in known if shares(gpus, layout, total)]
        if not layouts:
            raise InvalidInputError(
                _(
                    "{samples} samples do not divide over {gpus} GPUs with the layouts that are allowed: change the "
                    "batch or gpus",
                    samples=total,
                    gpus=gpus,
                )
            )
        plans: dict[Parallel | None, Plan] = {}
        ways: dict[Parallel | None, LayoutPlan] = {}
        best: float | None = None
        bounds: dict[Parallel | None, float | None] = {}
        for layout in sorted(layouts, key=trial_order):
            ways[layout] = self._as_written(gpus, layout, total, wires)
        for layout in sorted((one for one in layouts if not ways[one].why), key=lambda one: _nearness(ways[one])):
            bounds[layout] = best
            plan, ways[layout] = self._try(gpus, layout, total, wires, best, ways[layout])
            if plan is not None:
                plans[layout] = plan
            seconds = ways[layout].seconds
            if ways[layout].fits and seconds is not None:
                best = seconds if best is None else min(best, seconds)
        if not plans:  # the one that takes least, so that there is a figure to show
            layout = min(layouts, key=self.size.least)
            plan, ways[layout] = self._planned(gpus, layout, total, wires)
            plans[layout] = plan
        ordered = {layout: ways[layout] for layout in layouts}
        proven: dict[Parallel | None, LayoutPlan] = {}
        while (layout := _cheapest(ordered, plans)) not in proven:
            plans[layout], proven[layout] = self._planned(gpus, layout, total, wires, bounds[layout], thorough=True)
            if (proven[layout].fits, proven[layout].changes) != (ordered[layout].fits, ordered[layout].changes):
                ordered[layout] = proven[layout]  # otherwise the time stays by which it was compared
        return self._spread(plans[layout], gpus, total, wires, layout, _compared({**ordered, **proven}, layout))

    def _topology(self, gpus: int) -> Topology:
        return topology(self.request.link, gpus=gpus, node=min(gpus, self.request.node), gpu=self.budget.gpu)

    def _source(self, layout: Parallel | None, wires: Topology) -> Source:
        if layout not in self.sources:
            made = self.source_for(self.step.with_(parallel=layout), None if layout is None else wires)
            made = with_few_blocks(replace(made, explored={}))
            self.sources[layout] = replace(made, trace=remembered(made.trace))
        return self.sources[layout]

    def _as_written(self, gpus: int, layout: Parallel | None, total: int, wires: Topology) -> LayoutPlan:
        """The step as it is written under one layout; with a reason where that cannot be."""
        least = self.size.least(layout)
        if least > self._budget(layout, wires).usable:
            return LayoutPlan(gpus, layout, fits=False, why=Reason(Why.NEEDS_STATES, amount=Amount(least)))
        self.progress(_("planning {layout}", layout=LayoutText(layout)))
        batch = shares(gpus, layout, total)
        try:
            source = self._source(layout, wires)
            written = source.trace(TraceRequest(batch, source.precision))
            if layout is not None and layout.tensor > 1 and not divides_layers(written):
                why = Message("no layer of this model is divided over GPUs of a node")
                return LayoutPlan(gpus, layout, fits=False, why=why)
            self._learn_states(written, layout)
            seconds = seconds_of(written, batch, self.budget, wires, self.step.accumulate)
            taken = written.at(batch)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            return LayoutPlan(gpus, layout, fits=False, why=failure(error))
        return LayoutPlan(
            gpus, layout, taken.fits(self._budget(layout, wires)), peak=taken.peak_reserved, seconds=seconds
        )

    def _try(
        self, gpus: int, layout: Parallel | None, total: int, wires: Topology, best: float | None, written: LayoutPlan
    ) -> tuple[Plan | None, LayoutPlan]:
        """The plan of one layout, where one was made, and what came of it.

        Args:
            gpus: in all.
            layout: the way that they are used.
            total: samples that they load at once.
            wires: between them.
            best: seconds of a step under the best layout so far.
            written: the step as it is written under this one.
        """
        # Only another precision than float32 can be faster than the step as it is written.
        least_time = self.step.precision != "32-true" or written.fits
        if least_time and best is not None and written.seconds is not None and written.seconds > best * (1 + TIME_STEP):
            return None, replace(written, why=longer(written.seconds / best, fits=written.fits))
        try:
            with collector_paused():
                return self._planned(gpus, layout, total, wires, best)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            return None, LayoutPlan(gpus, layout, fits=False, why=failure(error))

    def _planned(
        self,
        gpus: int,
        layout: Parallel | None,
        total: int,
        wires: Topology,
        best: float | None = None,
        *,
        thorough: bool = False,
    ) -> tuple[Plan, LayoutPlan]:
        """The plan of one layout, with the time that a step takes under it; nothing that takes longer than ``best``."""
        batch = shares(gpus, layout, total)
        source = replace(self._source(layout, wires), most_seconds=best, thorough=thorough)
        plan = self.plan_source(source, batch, self._budget(layout, wires), self.allowed)
        taken = None
        if plan.timeline is not None and plan.timeline.work:
            taken = seconds_of(plan.timeline, plan.micro_batch_size, self.budget, wires, plan.accumulate)
        elif plan.timeline_before is not None and plan.slowdown is not None:  # composed, which says nothing of its work
            written = seconds_of(plan.timeline_before, batch, self.budget, wires, self.step.accumulate)
            taken = None if written is None else plan.slowdown * written
        changes = Option(plan.precision, plan.splits, plan.recipe)
        said = changes.words(batch, plan.precision_before) if plan.changed else ""
        why: Reason | str = ""
        if not plan.fits:
            why = why_not(plan) if best is None else Reason(Why.NOT_FASTER)
        return plan, LayoutPlan(gpus, layout, plan.fits, said, plan.peak, taken, why)

    def _budget(self, layout: Parallel | None, wires: Topology) -> Budget:
        return less_nccl(self.budget, layout, wires)

    def _learn_states(self, timeline: Timeline, layout: Parallel | None) -> None:
        """How large optimizer states are, from a trace where they are divided as the weights are."""
        if self.size.states or (layout is not None and (layout.kind == "zero1" or layout.offload)):
            return
        held = {"parameters": 0, "optimizer_states": 0}
        for block in timeline.alive_at(len(timeline.events)):
            if block.category in held:
                held[block.category] += block.bytes_at(timeline.traced[0])
        whole = self.size.parameters
        if held["parameters"] and whole and self.size.trained == whole:
            # Padding makes shards a little larger than their part; states and weights alike.
            self.size = replace(self.size, states=0.99 * held["optimizer_states"] / held["parameters"])

    def _spread(
        self,
        made: Plan,
        gpus: int,
        total: int,
        wires: Topology,
        layout: Parallel | None,
        ways: Mapping[Parallel | None, LayoutPlan],
    ) -> SpreadPlan:
        node = 1 if layout is None else layout.gpus_of_a_node
        card = card_of(self.budget.gpu, made.budget.compute_capability)
        exchanged = Communication()
        if made.timeline is not None and made.timeline.work:
            size, rounds = made.micro_batch_size, made.accumulate
            exchanged = communication(made.timeline, size, card, wires, micro_batches=rounds)
        spread = Spread(
            gpus=gpus,
            layout=layout,
            topology=wires,
            batch_size=total // gpus if total % gpus == 0 else total,
            samples=total * self.step.accumulate,
            seconds=ways[layout].seconds,
            communication=exchanged,
            outside=None if layout is None else outside_allocator(layout, wires),
            host_per_node=made.estimate.host_peak * node,
            ways=tuple(ways.values()),
        )
        if layout is None:
            return SpreadPlan(made, spread)
        return SpreadPlan(replace(made, reason_values=tuple(map(spread_reason, made.reason_values))), spread)

    # --- as few as suffice ----------------------------------------------------------------------------------------

    def _fewest(self, total: int) -> SpreadPlan:
        """The plan on the fewest GPUs that suffice without host memory."""
        request, allowed = self.request, self.allowed
        within = tuple(name for name in request.layouts if name != "offload") or request.layouts
        self.request, self.allowed = replace(request, layouts=within), allowed - set(OFFLOADS)
        made: SpreadPlan | None = None
        most = 1
        for gpus in _counts(request.node, total):
            layouts = [layout for layout in self._layouts(gpus) if shares(gpus, layout, total)]
            wires = self._topology(gpus)
            if not layouts:
                continue
            most = gpus
            if not any(self._may_fit(layout, total, gpus, wires) for layout in sorted(layouts, key=trial_order)):
                continue
            made = self.on(gpus, total)
            if made.rank.fits:
                break
        made = self.on(most, total) if made is None else made
        self.request, self.allowed = request, allowed
        return made._replace(spread=replace(made.spread, found=made.rank.fits))

    def _may_fit(self, layout: Parallel | None, total: int, gpus: int, wires: Topology) -> bool:
        """True if a layout may fit: samples one by one, and everything checkpointed, leave it within the budget."""
        from vram_guard.techniques.blocks import find_blocks

        budget = self._budget(layout, wires)
        if self.size.least(layout) > budget.usable:
            return False
        self.progress(_("number of GPUs: {gpus}; looking at {layout}", gpus=gpus, layout=LayoutText(layout)))
        blocks = tuple(block.name for block in find_blocks(self.step.model))  # type: ignore[arg-type]
        recipe = AS_WRITTEN.with_(checkpoint=blocks, optimizer="for-loop")
        source = self._source(layout, wires)
        precision = "bf16-mixed" if source.precision == "32-true" and "precision" in self.allowed else source.precision
        least = source.request(precision, shares(gpus, layout, total), recipe, 1)
        try:
            taken = source.trace(least)
        except Exception:  # noqa: BLE001 - what cannot run so is looked at as it is
            return True
        self._learn_states(taken, layout)
        return taken.replay(1).peak_reserved <= budget.usable


def _counts(node: int, total: int) -> Iterator[int]:
    """Numbers of GPUs that may suffice, ascending: parts of a node, then whole nodes, while there are samples."""
    yield from (count for count in range(1, node + 1) if node % count == 0 and count <= total * node)
    count = 2 * node
    while count <= min(MOST_GPUS, total * node):
        yield count
        count += node


def _nearness(written: LayoutPlan) -> tuple[bool, bool, float]:
    """The order in which layouts are planned: what is found early leaves little to look for under the others.

    The fastest of those that fit as they are, then those that take the least memory; last what keeps weights on the
    host.
    """
    offload = written.layout is not None and written.layout.offload
    return not written.fits, offload, (written.seconds or 0.0) if written.fits else float(written.peak or 0)


def _cheapest(ways: Mapping[Parallel | None, LayoutPlan], plans: Mapping[Parallel | None, Plan]) -> Parallel | None:
    """The layout that fits and takes least time; the one that comes closest where none does."""
    fitting = {layout: way for layout, way in ways.items() if way.fits and layout in plans}
    if not fitting:
        return min(plans, key=lambda one: plans[one].peak)
    fastest = min((way.seconds for way in fitting.values() if way.seconds is not None), default=None)

    def cost(layout: Parallel | None) -> float:
        seconds = fitting[layout].seconds
        return float("inf") if seconds is None or not fastest else round(seconds / fastest / TIME_STEP)

    # Of equal ones the first, which is the simplest.
    return min(fitting, key=cost)


def _compared(ways: Mapping[Parallel | None, LayoutPlan], taken: Parallel | None) -> dict[Parallel | None, LayoutPlan]:
    """The ways, with what those that fit as well cost more than the one that is taken."""
    least = ways[taken].seconds
    return {
        layout: replace(way, why=longer(way.seconds / least, fits=True))
        if layout != taken and way.fits and way.seconds is not None and least
        else way
        for layout, way in ways.items()
    }
