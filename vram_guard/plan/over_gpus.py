"""A plan over several GPUs: every layout is planned as one GPU is, and the cheapest that fits is taken.

The training stays the one that was written: all GPUs together take the same samples for an optimizer step under every
layout. Where layers are divided over ``tensor`` GPUs, these take the batches of all of them, in micro-batches if need
be.

A layout is left out without a trace where the weights, gradients and optimizer states alone exceed the budget, and
without a search where it takes longer as it is than another one that fits already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from vram_guard.checks import checked_count
from vram_guard.errors import InvalidInputError, VramGuardError
from vram_guard.language import Message, _
from vram_guard.parallel.links import Topology, topology
from vram_guard.parallel.outside import OutsideAllocator, outside_allocator
from vram_guard.parallel.spec import GPUS_OF_A_NODE, MOST_GPUS, Parallel
from vram_guard.plan._option import Option
from vram_guard.plan.communication import communication
from vram_guard.plan.descriptions import Reason, Why, recipe_words
from vram_guard.plan.layouts import LayoutText, ModelSize, checked_layouts, layouts_of
from vram_guard.plan.model import Plan
from vram_guard.plan.roofline import Communication
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.spread import Spread, Way
from vram_guard.plan.step_time import card_of, step_seconds
from vram_guard.plan.techniques import OFFLOADS
from vram_guard.step import TrainingStep
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard.units import Amount, format_bytes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.timeline import Timeline

#: Layouts whose times differ by less are equal, and the simpler one is taken: the model is not that good.
TIME_STEP = 0.001

PlanSource = Callable[[Source, int, "Budget", "frozenset[str]"], Plan]


@dataclass(frozen=True)
class GpusRequest:
    """The GPUs that a plan may use.

    Attributes:
        gpus: how many; "auto": as few as suffice.
        node: GPUs of a node.
        link: as in :func:`vram_guard.parallel.links.topology`.
        layouts: names of :data:`vram_guard.plan.layouts.LAYOUTS`.
        compare: other numbers of GPUs that are planned as well.
    """

    gpus: int | Literal["auto"]
    node: int
    link: str | Topology | None
    layouts: tuple[str, ...]
    compare: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        gpus: object,
        node: int | None,
        link: str | Topology | None,
        layouts: Iterable[str] | None,
        compare: Iterable[int],
    ) -> GpusRequest:
        """The request, checked.

        Raises:
            InvalidInputError: a number makes no sense or does not divide, or a link or layout is not known.
        """
        if not isinstance(compare, Iterable):
            raise InvalidInputError(
                _("compare_gpus must be a list of numbers of GPUs, not {value}", value=repr(compare)[:60])
            )
        counts = tuple(_checked_gpus("compare_gpus", one) for one in compare)
        number = gpus if gpus == "auto" else _checked_gpus("gpus", gpus)
        per_node = GPUS_OF_A_NODE if node is None else checked_count("node", node)
        for one in (*counts, *([] if isinstance(number, str) else [number])):
            Parallel(gpus=one, node=per_node)  # says so where nodes are not full
        topology(link, gpus=per_node, node=per_node)
        return cls(number, per_node, link, checked_layouts(layouts), counts)  # type: ignore[arg-type]


def _checked_gpus(name: str, value: object) -> int:
    count = checked_count(name, value)
    if count > MOST_GPUS:
        raise InvalidInputError(_("{name} must be at most {most}, not {value}", name=name, most=MOST_GPUS, value=count))
    return count


def check_step(step: TrainingStep | Source, request: GpusRequest, *, grow: bool) -> TrainingStep:
    """Check that a step can be spread.

    Raises:
        InvalidInputError: it is spread already, or does not train.
    """
    if not isinstance(step, TrainingStep):
        raise InvalidInputError(_("gpus is for a TrainingStep: a loop that is followed has its own processes"))
    if step.parallel is not None:
        raise InvalidInputError(
            _("the step is spread over GPUs already (step.parallel): leave that out, or leave gpus out")
        )
    if step.optimizer is None:
        raise InvalidInputError(_("gpus is for trainings: this step has no optimizer"))
    if step.data_parallel_ranks not in (1, request.gpus):
        raise InvalidInputError(
            _(
                "the step says data_parallel_ranks={ranks} and gpus is {gpus}: leave one of them out",
                ranks=step.data_parallel_ranks,
                gpus=request.gpus,
            )
        )
    if grow:
        raise InvalidInputError(_("grow and gpus do not go together: the batch of all GPUs stays as it is"))
    return step.with_(data_parallel_ranks=1)


def less_nccl(budget: Budget, taken: OutsideAllocator) -> Budget:
    """A card's budget without what NCCL takes of it; an amount that PyTorch may reserve stays."""
    if budget.source == "explicit" or not taken.high:
        return budget
    note = _("less {amount} for NCCL (estimate)", amount=format_bytes(taken.high))
    return replace(budget, available=max(0, budget.available - taken.high), notes=(*budget.notes, note))


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
        counts = tuple(self._counted(count, total, made) for count in self.request.compare)
        assert made.spread is not None
        return replace(made, spread=replace(made.spread, counts=counts))

    def _counted(self, gpus: int, total: int, known: Plan) -> Way:
        """The best way on another number of GPUs."""
        if known.spread is not None and known.spread.gpus == gpus:
            return best_way(known)
        if not any(shares(gpus, layout, total) for layout in self._layouts(gpus)):
            why = Message("{samples} samples do not divide over {gpus} GPUs", samples=total, gpus=gpus)
            return Way(gpus, None, fits=False, why=why)
        return best_way(self.on(gpus, total))

    def _layouts(self, gpus: int) -> list[Parallel | None]:
        return list(layouts_of(gpus, self.request.node, self.request.layouts, self.step.precision))

    # --- one number of GPUs ---------------------------------------------------------------------------------------

    def on(self, gpus: int, total: int) -> Plan:
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
        ways: dict[Parallel | None, Way] = {}
        best: float | None = None
        for layout in sorted(layouts, key=_trial_order):
            plan, ways[layout] = self._try(gpus, layout, total, wires, best)
            if plan is not None:
                plans[layout] = plan
            seconds = ways[layout].seconds
            if ways[layout].fits and seconds is not None:
                best = seconds if best is None else min(best, seconds)
        if not plans:  # the one that takes least, so that there is a figure to show
            layout = min(layouts, key=self.size.least)
            plan, ways[layout] = self._planned(gpus, layout, total, wires)
            plans[layout] = plan
        return self._chosen(gpus, total, wires, [(layout, ways[layout]) for layout in layouts], plans)

    def _topology(self, gpus: int) -> Topology:
        return topology(self.request.link, gpus=gpus, node=min(gpus, self.request.node), gpu=self.budget.gpu)

    def _source(self, layout: Parallel | None, wires: Topology) -> Source:
        if layout not in self.sources:
            made = self.source_for(self.step.with_(parallel=layout), None if layout is None else wires)
            self.sources[layout] = replace(made, trace=_remembered(made.trace))
        return self.sources[layout]

    def _try(
        self, gpus: int, layout: Parallel | None, total: int, wires: Topology, best: float | None
    ) -> tuple[Plan | None, Way]:
        """The plan of one layout, where one was made, and what came of it."""
        least = self.size.least(layout)
        if least > self._budget(layout, wires).usable:
            return None, Way(gpus, layout, fits=False, why=Reason(Why.NEEDS_STATES, amount=Amount(least)))
        self.progress(_("planning {layout}", layout=LayoutText(layout)))
        batch = shares(gpus, layout, total)
        try:
            source = self._source(layout, wires)
            written = source.trace(TraceRequest(batch, source.precision))
            if layout is not None and layout.tensor > 1 and not _divides_layers(written):
                why = Message("no layer of this model is divided over GPUs of a node")
                return None, Way(gpus, layout, fits=False, why=why)
            self._learn_states(written, layout)
            seconds = _seconds(written, batch, self.budget, wires, self.step.accumulate)
            # Only another precision than float32 can be faster than the step as it is written.
            least_time = source.precision != "32-true" or written.at(batch).fits(self._budget(layout, wires))
            if least_time and best is not None and seconds is not None and seconds > best * (1 + TIME_STEP):
                taken = written.at(batch)
                fits = taken.fits(self._budget(layout, wires))
                kind = Why.COSTS_MORE_THAN if fits else Why.NO_FIT_AND_SLOWER
                slower = Reason(kind, factor=f"{seconds / best:.2f}")
                return None, Way(gpus, layout, fits, peak=taken.peak_reserved, seconds=seconds, why=slower)
            return self._planned(gpus, layout, total, wires, best)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            return None, Way(gpus, layout, fits=False, why=_failure(error))

    def _planned(
        self, gpus: int, layout: Parallel | None, total: int, wires: Topology, best: float | None = None
    ) -> tuple[Plan, Way]:
        """The plan of one layout, with the time that a step takes under it; nothing that takes longer than ``best``."""
        batch = shares(gpus, layout, total)
        source = replace(self._source(layout, wires), most_seconds=best)
        plan = self.plan_source(source, batch, self._budget(layout, wires), self.allowed)
        taken = None
        if plan.timeline is not None:
            taken = _seconds(plan.timeline, plan.micro_batch_size, self.budget, wires, plan.accumulate)
        changes = Option(plan.precision, plan.splits, plan.recipe)
        said = changes.words(batch, plan.precision_before) if plan.changed else ""
        why: Reason | str = ""
        if not plan.fits:
            why = _why_not(plan) if best is None else Reason(Why.NOT_FASTER)
        return plan, Way(gpus, layout, plan.fits, said, plan.peak, taken, why)

    def _budget(self, layout: Parallel | None, wires: Topology) -> Budget:
        return self.budget if layout is None else less_nccl(self.budget, outside_allocator(layout, wires))

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

    def _chosen(
        self,
        gpus: int,
        total: int,
        wires: Topology,
        ways: list[tuple[Parallel | None, Way]],
        plans: Mapping[Parallel | None, Plan],
    ) -> Plan:
        """The plan of the cheapest way that fits; of the one that comes closest where none does."""
        fitting = [(layout, way) for layout, way in ways if way.fits and layout in plans]
        fastest = min((way.seconds for _layout, way in fitting if way.seconds is not None), default=None)

        def cost(item: tuple[Parallel | None, Way]) -> float:
            seconds = item[1].seconds
            return float("inf") if seconds is None or not fastest else round(seconds / fastest / TIME_STEP)

        # Of equal ones the first, which is the simplest.
        layout = min(fitting, key=cost)[0] if fitting else min(plans, key=lambda one: plans[one].peak)
        made = plans[layout]
        taken = dict(ways)[layout]
        others = []
        for one, way in ways:
            if one == layout:
                others.append(way)
                continue
            if way.fits and way.seconds is not None and taken.seconds:
                way = replace(way, why=Reason(Why.COSTS_MORE_THAN, factor=f"{way.seconds / taken.seconds:.2f}"))  # noqa: PLW2901
            others.append(way)
        return self._spread(made, gpus, total, wires, layout, taken, tuple(others))

    def _spread(
        self,
        made: Plan,
        gpus: int,
        total: int,
        wires: Topology,
        layout: Parallel | None,
        taken: Way,
        ways: tuple[Way, ...],
    ) -> Plan:
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
            seconds=taken.seconds,
            communication=exchanged,
            outside=None if layout is None else outside_allocator(layout, wires),
            host_per_node=made.estimate.host_peak * node,
            ways=ways,
        )
        if layout is None:
            return replace(made, spread=spread)
        first = [Reason(Why.SPREAD, layout=LayoutText(layout))] if made.fits else []
        why = (*first, *map(_spread_reason, made.reason_values))
        return replace(made, spread=spread, reason_values=why)

    # --- as few as suffice ----------------------------------------------------------------------------------------

    def _fewest(self, total: int) -> Plan:
        """The plan on the fewest GPUs that suffice without host memory."""
        request, allowed = self.request, self.allowed
        within = tuple(name for name in request.layouts if name != "offload") or request.layouts
        self.request, self.allowed = replace(request, layouts=within), allowed - set(OFFLOADS)
        made, most = None, 1
        for gpus in _counts(request.node, total):
            layouts = [layout for layout in self._layouts(gpus) if shares(gpus, layout, total)]
            wires = self._topology(gpus)
            if not layouts:
                continue
            most = gpus
            if not any(self._may_fit(layout, total, gpus, wires) for layout in layouts):
                continue
            made = self.on(gpus, total)
            if made.fits:
                break
        made = self.on(most, total) if made is None else made
        self.request, self.allowed = request, allowed
        assert made.spread is not None
        return replace(made, spread=replace(made.spread, found=made.fits))

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


def shares(gpus: int, layout: Parallel | None, total: int) -> int:
    """Samples that a rank loads at once, of ``total`` over all GPUs; 0 where they do not divide."""
    tensor = 1 if layout is None else layout.tensor
    share, rest = divmod(total * tensor, gpus)
    return 0 if rest else share


def _counts(node: int, total: int) -> Iterator[int]:
    """Numbers of GPUs that may suffice, ascending: parts of a node, then whole nodes, while there are samples."""
    yield from (count for count in range(1, node + 1) if node % count == 0 and count <= total * node)
    count = 2 * node
    while count <= min(MOST_GPUS, total * node):
        yield count
        count += node


def _trial_order(layout: Parallel | None) -> tuple[bool, bool, bool]:
    """FSDP2 first: it fits where most others do not, and tells how large the optimizer states are."""
    if layout is None:
        return False, False, False
    plain = layout.kind == "fsdp2" and layout.reshard is True and layout.tensor == 1
    return layout.offload, layout.tensor > 1, not (plain and not layout.offload)


def _remembered(trace: Callable[[TraceRequest], Timeline]) -> Callable[[TraceRequest], Timeline]:
    """The same, each request traced once."""
    known: dict[TraceRequest, Timeline] = {}

    def remembered(request: TraceRequest) -> Timeline:
        if request not in known:
            known[request] = trace(request)
        return known[request]

    return remembered


def _seconds(timeline: Timeline, size: int, budget: Budget, wires: Topology, micro_batches: int) -> float | None:
    """One optimizer step on every GPU; None where the timeline says nothing of its work."""
    try:
        time = step_seconds(timeline, size, budget.gpu, micro_batches=micro_batches)
    except InvalidInputError:
        return None
    card = card_of(budget.gpu, timeline.compute_capability)
    waited = communication(timeline, size, card, wires, micro_batches=micro_batches)
    return (time + waited.step_time).seconds


def _divides_layers(timeline: Timeline) -> bool:
    """True if tensor parallelism does something: the ranks that share a layer talk to each other."""
    return any(one.dimension == "tensor" for one in timeline.collectives)


def _failure(error: Exception) -> Message | str:
    if isinstance(error, VramGuardError):
        return str(error)
    return Reason(Why.FAILS, error=f"{type(error).__name__}: {error}")


def _spread_reason(reason: Reason) -> Reason:
    """The same reason where "as written" means: spread in the way that was chosen."""
    kinds = {Why.FITS: Why.FITS_SPREAD, Why.SHORTAGE: Why.SHORTAGE_SPREAD}
    return Reason(kinds[reason.kind], **dict(reason.values)) if reason.kind in kinds else reason


def _why_not(plan: Plan) -> Reason:
    missing = plan.nearest_miss
    over = min(
        (amount for amount in (plan.peak - plan.budget.usable, missing.missing if missing else 0) if amount > 0),
        default=0,
    )
    if over:
        return Reason(Why.NOTHING_FITS, missing=Amount(over))
    return Reason(Why.LOWER_BOUND, peak=Amount(plan.peak))


def best_way(made: Plan) -> Way:
    """The way that a plan takes, for a table of several numbers of GPUs."""
    assert made.spread is not None
    spread = made.spread
    way = next(way for way in spread.ways if way.layout == spread.layout)
    words = [*recipe_words(made.recipe)]
    return way if way.changes or not words else replace(way, changes="; ".join(words))
