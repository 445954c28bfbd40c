"""Timeline: every allocation and free of a training step, for every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, NoReturn

from vram_guard.allocator import PLACEMENTS, AllocatorSettings, Placement, Replay, host_peak, replay
from vram_guard.allocator.blocks import LEAST_BLOCK
from vram_guard.budget import GPU, Budget
from vram_guard.budget.margins import Network, measured_margin
from vram_guard.checks import checked_count
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.parallel.spec import Parallel
from vram_guard.releases import Releases
from vram_guard.scratch import Card
from vram_guard.timeline._estimate import Estimate, OutOfMemoryPoint
from vram_guard.timeline._values import (
    CATEGORIES,
    STEP_PHASES,
    Block,
    Category,
    Collective,
    CompiledCode,
    CudnnAnswers,
    Deferred,
    Frees,
    Growth,
    HostBlock,
    LaterChange,
    Leak,
    Marks,
    Note,
    Phase,
    PhasePeak,
    Scratch,
    StateChange,
    Stretch,
    StretchName,
    Tier,
    UpperReason,
    Work,
    Workspaces,
    lower,
)


def _untraceable(batch_size: int) -> NoReturn:
    raise UnsupportedStepError(
        _("batches of {size} samples can be traced only in the process that has the model", size=batch_size)
    )


@dataclass(frozen=True)
class Timeline:
    """Two consecutive training steps as a sequence of allocations and frees, affine in the batch size.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> timeline = trace(step)
        >>> timeline.at(1000).peak_allocated < timeline.at(2000).peak_allocated
        True
    """

    blocks: tuple[Block, ...]
    events: tuple[int, ...]
    """``i >= 0``: block ``i`` is allocated; ``~i`` (negative): block ``i`` is freed. In CUDA's order."""
    phases: tuple[Phase, ...]
    traced: tuple[int, ...]
    """The batch sizes that were really traced."""
    tier: Tier = "symbolic"
    notes: tuple[Note, ...] = ()
    compute_capability: tuple[int, int] = (8, 0)
    multiprocessors: int | None = None
    """Of the card that is meant; None: the most that a card of this compute capability has."""
    placement: Placement | None = None
    """Where CUDA puts new segments on the card that is meant; None: not known, and the larger peak counts."""
    precision: str = "32-true"
    work: tuple[Work, ...] = field(default=(), repr=False)
    """Computation and traffic of the operators of the second step (of the only one), in order; empty: not known."""
    host_blocks: tuple[HostBlock, ...] = ()
    """Blocks that the step puts into host memory."""
    host_events: tuple[int, ...] = ()
    """As ``events``, for ``host_blocks``."""
    changes: tuple[StateChange, ...] = ()
    """What the forwards of watched modules change; empty where none were watched."""
    collectives: tuple[Collective, ...] = ()
    """The calls of both steps for which several processes wait for each other, in order."""
    deferred: tuple[Deferred, ...] = ()
    """The frees that may happen later than where they stand among ``events``, in order."""
    releases: Releases = field(default_factory=Releases.here, repr=False, compare=False)
    """The releases that it was traced with."""
    network: Network | None = None
    """The kind of network, by the operators of the step; None: not known."""
    cudnn: CudnnAnswers | None = None
    """The cuDNN that was asked for workspaces; None: none was."""
    parallel: Parallel | None = None
    """The layout over several GPUs, one rank of which this is; None: one GPU."""
    optimizer: str = field(default="", repr=False, compare=False)
    """Name of the optimizer's class; "": there is none, or it is not known."""
    growth: tuple[Growth, ...] = ()
    """The blocks that each further step would leave behind, of the last step."""
    steps: int | None = None
    """Optimizer steps of the whole run, or as many as it has at least; None: not known."""
    later_changes: frozenset[LaterChange] = frozenset()
    """How later steps differ from the first: other weights are "trained", or handed to the optimizer ("optimized")."""
    compiled: CompiledCode | None = None
    """What ``torch.compile`` made of the step, where that was followed."""
    marks: Marks | None = field(default=None, repr=False, compare=False)
    """Where parts of it begin and end; None where that was not asked for."""
    asked: tuple[tuple[Callable[[tuple[int, int]], Any], Any], ...] | None = field(
        default=None, repr=False, compare=False
    )
    """What the traces asked of the compute capability, each with the answer; None: not known."""
    retrace: Callable[[int], Timeline] | None = field(default=None, repr=False, compare=False)
    """Set where the sequence itself differs between batch sizes: then each size asked for is traced."""

    def __repr__(self) -> str:
        sizes = " and ".join(map(str, self.traced))
        return f"<Timeline of batch sizes {sizes}: {len(self.blocks)} allocations, {self.precision}, {self.tier}>"

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process, where the step cannot be traced."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**state, "retrace": None if self.retrace is None else _untraceable}

    @property
    def card(self) -> Card:
        """What kernels ask the device for."""
        from vram_guard.budget.catalogue import most_multiprocessors

        count = self.multiprocessors or most_multiprocessors(self.compute_capability)
        return Card(self.compute_capability, count)

    def on(self, multiprocessors: int | None, placement: Placement | None = None) -> Timeline:
        """The same step on a card of the same compute capability.

        Args:
            multiprocessors: so many; None: unknown.
            placement: where CUDA puts new segments on it; None: unknown.
        """
        if (multiprocessors, placement) == (self.multiprocessors, self.placement):
            return self
        return replace(self, multiprocessors=multiprocessors, placement=placement)

    def of_capability(self, capability: tuple[int, int]) -> Timeline | None:
        """The same step on a card of another compute capability; None where its trace may differ.

        Kernels differ by classes of capabilities: a trace that was answered alike would be the same.
        """
        if capability == self.compute_capability:
            return self
        if self.asked is None or any(question(capability) != answer for question, answer in self.asked):
            return None
        return replace(self, compute_capability=capability)

    def sizes(self, batch_size: int, *, workspaces: Workspaces = "known") -> Sequence[int]:
        """Requested bytes of every block at this batch size, in block order."""
        if workspaces != "known":
            return self._sizes(batch_size, workspaces)
        last = self._last_sizes
        if batch_size not in last:
            last.clear()
            last[batch_size] = self._sizes(batch_size, workspaces)
        return last[batch_size]

    @cached_property
    def _last_sizes(self) -> dict[int, Sequence[int]]:
        """Those of one batch size: a search asks for the same several times."""
        return {}

    def _sizes(self, batch_size: int, workspaces: Workspaces) -> Sequence[int]:
        card = self.card
        scratch_bytes = cache(partial(Scratch.bytes_at, batch_size=batch_size, card=card))  # equal blocks ask the same
        # As Block.bytes_at, which would cost a call for each of a hundred thousand.
        sizes = [
            0 if unknown else size[0] + size[1] * batch_size if scratch is None else scratch_bytes(scratch)
            for size, _category, _module, _source, _operator, _optional, scratch, unknown, _stream in self.blocks
        ]
        for index, block in enumerate(self.blocks if workspaces != "known" else ()):
            if block.unknown and workspaces == "most":
                sizes[index] = block.size.at(batch_size)
            elif block.optional and workspaces == "none":
                sizes[index] = 0
        return sizes

    @cached_property
    def streams(self) -> tuple[int, ...] | None:
        """The stream of every block; None where all are on the default stream."""
        streams = tuple(block.stream for block in self.blocks)
        return streams if any(streams) else None

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The phases of the run, training steps in a row as one; a single one where there are no others."""
        found: list[Stretch] = []
        for phase in self.phases:
            name: StretchName = "training" if phase.name in STEP_PHASES else phase.name
            if not found or (name, phase.label) != found[-1][:2]:
                found.append(Stretch(name, phase.label, phase.start if found else 0, phase.step, phase.tier))
            found[-1] = found[-1]._replace(tier=lower(found[-1].tier, phase.tier))
        only_steps = all(stretch.name in ("setup", "training") and not stretch.label for stretch in found)
        return (Stretch("training", "", 0, 0),) if only_steps else tuple(found)

    @cached_property
    def upper_reasons(self) -> tuple[UpperReason, ...]:
        """Why the reserved peak has a range."""
        by_fft = {block.operator.startswith("aten._fft_") for block in self.blocks if block.unknown}
        found: list[tuple[bool, UpperReason]] = [
            (False in by_fft, "workspaces"),
            (True in by_fft, "transforms"),
            (bool(self.deferred), "streams"),
        ]
        return tuple(reason for holds, reason in found if holds)

    @property
    def late_events(self) -> tuple[int, ...]:
        """The events with the frees that wait for other streams as late as they may be."""
        if not self.deferred:
            return self.events
        moved: dict[int, list[int]] = {}
        for free, until in self.deferred:
            moved.setdefault(until, []).append(self.events[free])
        left_out = {one.free for one in self.deferred}
        late: list[int] = []
        for index, event in enumerate((*self.events, None)):
            late += moved.get(index, ())
            if event is not None and index not in left_out:
                late.append(event)
        return tuple(late)

    def host_sizes(self, batch_size: int) -> list[int]:
        """Requested bytes of every host block at this batch size, in block order."""
        return [block.size.at(batch_size) for block in self.host_blocks]

    def host_peak(self, batch_size: int) -> int:
        """Bytes of host memory in what the step moves there at their maximum; pinned memory as it is rounded."""
        timeline = self.exact(batch_size)
        pinned = [block.pinned for block in timeline.host_blocks]
        return host_peak(timeline.host_events, timeline.host_sizes(batch_size), pinned)

    def exact(self, batch_size: int) -> Timeline:
        """The timeline that holds at this batch size: itself, or a fresh trace where the law breaks."""
        checked_count("batch_size", batch_size)
        if self.retrace is None or batch_size in self.traced:
            return self
        return self.retrace(batch_size).on(self.multiprocessors, self.placement)

    def replay(
        self,
        batch_size: int,
        *,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
        curve: bool = False,
        workspaces: Workspaces = "known",
        frees: Frees = "at once",
    ) -> Replay:
        """Run the events at one batch size through the caching allocator.

        Where it is not known how CUDA places segments, both ways are tried, and the one that takes more is the answer.

        Args:
            batch_size: samples per micro-batch.
            capacity: bytes the allocator may reserve; None: no limit.
            settings: the allocator's settings; None: PyTorch's defaults.
            curve: also record allocated and reserved bytes after every event.
            workspaces: those of convolutions that count.
            frees: when memory that other streams use is free again. "late" moves events: indices of the result are
                not those of ``events``.
        """
        return self.replays(
            batch_size, capacity=capacity, settings=settings, curve=curve, workspaces=workspaces, frees=frees
        )[-1]

    def replays(
        self,
        batch_size: int,
        *,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
        curve: bool = False,
        workspaces: Workspaces = "known",
        frees: Frees = "at once",
    ) -> list[Replay]:
        """As :meth:`replay`, one for each possible placement of segments; the one that takes most is the last."""
        timeline = self.exact(batch_size)
        settings = settings or AllocatorSettings()
        # Without a limit everything fits, and nothing has to be done without.
        optional = () if capacity is None else {i for i, block in enumerate(timeline.blocks) if block.optional}
        found = [
            replay(
                timeline.late_events if frees == "late" else timeline.events,
                timeline.sizes(batch_size, workspaces=workspaces),
                settings=settings,
                capacity=capacity,
                curve=curve,
                streams=timeline.streams,
                optional=optional,
                starts=tuple(stretch.start for stretch in timeline.stretches),
                placement=placement,
            )
            for placement in timeline.placements(settings)
        ]
        return sorted(found, key=lambda one: (one.failure is not None, one.peak_reserved))

    def placements(self, settings: AllocatorSettings) -> tuple[Placement, ...]:
        """Where CUDA may put new segments, as far as it decides anything: no two blocks share an expandable one."""
        if self.placement is not None:
            return (self.placement,)
        return PLACEMENTS[:1] if settings.expandable_segments else PLACEMENTS

    def at(
        self,
        batch_size: int,
        *,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> Estimate:
        """The memory that the step takes at this batch size. Milliseconds, unless the step has to be traced anew."""
        timeline = self.exact(checked_count("batch_size", batch_size))
        smallest, *_others = results = timeline.replays(batch_size, capacity=capacity, settings=settings)
        result = results[-1]
        return replace(
            _estimate(timeline, batch_size, result),
            peak_lower=smallest.peak_reserved if smallest.peak_reserved < result.peak_reserved else 0,
            peak_upper=_upper(timeline, batch_size, result.peak_reserved, settings),
            upper_reasons=timeline.upper_reasons,
            cudnn_bytes=_added_by_cudnn(timeline, batch_size, result.peak_reserved, settings),
        )

    def spans(self) -> Iterator[tuple[Phase, int]]:
        """Each phase, and the index behind its last event: ``events[phase.start:end]`` are its own."""
        starts = (*(phase.start for phase in self.phases), len(self.events))
        return zip(self.phases, starts[1:], strict=True)

    def phase_of(self, event: int) -> Phase:
        """The phase that the event with this index belongs to."""
        current = self.phases[0]
        for phase in self.phases:
            if phase.start > event:
                break
            current = phase
        return current

    def alive_at(self, end: int) -> list[Block]:
        """The blocks that are allocated and not freed by ``events[:end]``, in the order of their allocation."""
        alive: dict[int, None] = {}
        for event in self.events[:end]:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
        return [self.blocks[index] for index in alive]

    def max_batch_size(
        self,
        budget: Budget | GPU | str | int,
        *,
        settings: AllocatorSettings | None = None,
        limit: int = 2**20,
    ) -> int:
        """The largest batch size whose reserved peak stays within the budget; 0 if not even 1 does.

        Args:
            budget: a :class:`vram_guard.Budget`, an amount ("24GiB"), bytes, or a GPU's name.
            settings: the allocator's settings.
            limit: the largest batch size that is considered.

        Example:
            >>> net = torch.nn.Linear(256, 256)
            >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
            >>> timeline = trace(step)
            >>> largest = timeline.max_batch_size("64MiB")
            >>> timeline.at(largest).fits(Budget.of("64MiB"))
            True
        """
        from vram_guard.budget import Budget

        held_against = Budget.of(budget)

        def may_fit(timeline: Timeline, batch_size: int) -> bool:
            return held_against.holds(_least_reserved(timeline, batch_size), self.tier, self.network)

        def fits(batch_size: int) -> bool:
            if self.tier == "partly symbolic" and len(self.stretches) > 1:  # which of them decides, an estimate tells
                return self.at(batch_size, settings=settings).fits(held_against)
            if not may_fit(self.exact(batch_size), batch_size):
                return False  # as most sizes that do not fit: that takes no replay
            peak = self.replay(batch_size, settings=settings).peak_reserved
            return held_against.holds(peak, self.tier, self.network)

        near = largest_that_fits(partial(may_fit, self), checked_count("limit", limit))
        return largest_that_fits(fits, limit, near)


def _upper(timeline: Timeline, batch_size: int, reserved: int, settings: AllocatorSettings | None) -> int:
    """The upper end of the reserved peak; 0 where it has no range.

    With every workspace at its most the peak can be the lower one: what they leave behind serves other tensors. One of
    them alone may find no block that is free and large enough, and adds a segment of its own.
    """
    if not timeline.upper_reasons:
        return 0
    most = timeline.replay(batch_size, settings=settings, workspaces="most", frees="late").peak_reserved
    alone = max((block.size.at(batch_size) for block in timeline.blocks if block.unknown), default=0)
    return max(most, reserved + alone)


def _added_by_cudnn(timeline: Timeline, batch_size: int, reserved: int, settings: AllocatorSettings | None) -> int:
    """Bytes that an asked cuDNN's answers add to the reserved peak."""
    if timeline.cudnn is None or timeline.cudnn.refused:
        return 0
    return max(0, reserved - timeline.replay(batch_size, settings=settings, workspaces="none").peak_reserved)


def _least_reserved(timeline: Timeline, batch_size: int) -> int:
    """Bytes that are asked for and not given back, at the most: no replay reserves less, and this is quicker."""
    sizes = [-(-size // LEAST_BLOCK) * LEAST_BLOCK for size in timeline.sizes(batch_size)]
    return max(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in timeline.events), default=0)


def largest_that_fits(fits: Callable[[int], bool], limit: int, near: int = 1) -> int:
    """The largest count in ``1..limit`` below which nothing was seen to fail; 0 if nothing fits.

    Powers of two lead from the one below ``near`` to two neighbours of which one fits and the other does not; then it
    bisects. So every ``near`` leads to the same answer, unless a smaller power of two fails where this pair is: from 1
    in about ``2 log2(answer)`` calls, from the answer's own size in half of these.
    """
    low, high = 0, limit + 1
    at = 1 << (min(max(near, 1), limit).bit_length() - 1)
    while low < at < high:
        if fits(at):
            low, at = at, at * 2
        else:
            high, at = at, at // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _estimate(timeline: Timeline, batch_size: int, result: Replay) -> Estimate:
    """The holders of the bytes at the allocated peak of a replay."""
    breakdown: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    by_module: dict[str, int] = {}
    by_stream = [0] * (max(timeline.streams or (0,)) + 1)
    for index, granted in result.peak_live.items():
        block = timeline.blocks[index]
        breakdown[block.category] += granted
        by_module[block.module] = by_module.get(block.module, 0) + granted
        by_stream[block.stream] += granted
    asked = timeline.blocks[timeline.events[result.peak_event]] if timeline.events else None
    phases = _phase_peaks(timeline, result)
    return Estimate(
        batch_size=batch_size,
        peak_allocated=result.peak_allocated,
        peak_reserved=result.peak_reserved,
        breakdown=breakdown,
        by_module=dict(sorted(by_module.items(), key=lambda item: -item[1])),
        peak_phase=timeline.phase_of(result.peak_event),
        peak_module=asked.module if asked else "",
        peak_source=asked.source if asked else "",
        peak_operator=asked.operator if asked else "",
        tier=_deciding_tier(timeline, phases),
        notes=timeline.notes,
        out_of_memory=_out_of_memory_point(timeline, batch_size, result),
        host_peak=timeline.host_peak(batch_size),
        releases=timeline.releases,
        network=timeline.network,
        cudnn=timeline.cudnn,
        by_stream=tuple(by_stream) if timeline.streams else (),
        phases=phases,
        leaks=_leaks(timeline, batch_size),
        steps=timeline.steps,
    )


def _leaks(timeline: Timeline, batch_size: int) -> tuple[Leak, ...]:
    """The growth of each line, the most first."""
    lines: dict[tuple[str, str], Leak] = {}
    for index, instead_of, kept_in in timeline.growth:
        block = timeline.blocks[index]
        size = _rounded(block.bytes_at(batch_size, timeline.card))
        if instead_of is not None:
            size -= _rounded(timeline.blocks[instead_of].bytes_at(batch_size, timeline.card))
        first = Leak(0, block.module, block.source, block.operator, kept_in)
        line = lines.setdefault((block.module, block.source), first)
        lines[block.module, block.source] = line._replace(bytes_per_step=line.bytes_per_step + size)
    return tuple(sorted((leak for leak in lines.values() if leak.bytes_per_step > 0), key=lambda leak: -leak[0]))


def _rounded(size: int) -> int:
    """Bytes as the allocator counts them."""
    return -(-size // LEAST_BLOCK) * LEAST_BLOCK


def _phase_peaks(timeline: Timeline, result: Replay) -> tuple[PhasePeak, ...]:
    """The peak of each phase; none where there are only training steps."""
    if len(timeline.stretches) == 1:
        return ()
    peaks = []
    ends = (*(stretch.start for stretch in timeline.stretches[1:]), len(timeline.events))
    for stretch, end, peak in zip(timeline.stretches, ends, result.stretches, strict=False):  # a replay may fail
        event = timeline.events[peak.event] if peak.event < end else -1
        asked = timeline.blocks[event] if event >= 0 else None
        step = timeline.phase_of(peak.event).step if peak.event < end else stretch.step
        origin = (asked.module, asked.source, asked.operator) if asked else ("", "", "")
        peaks.append(PhasePeak(stretch.name, stretch.label, step, peak.allocated, peak.reserved, *origin, stretch.tier))
    return tuple(peaks)


def _deciding_tier(timeline: Timeline, phases: tuple[PhasePeak, ...]) -> Tier:
    """The tier of the phase that needs most of a GPU with the margin of its own tier; the lowest where one is a bound.

    A phase that takes no more from the driver than those before it needs what it has allocated.
    """
    if not phases or timeline.tier == "formula":
        return timeline.tier
    reserved = 0
    needs: list[tuple[float, Tier]] = []
    for phase in phases:
        peak = phase.peak_reserved if phase.peak_reserved > reserved else phase.peak_allocated
        reserved = max(reserved, phase.peak_reserved)
        needs.append((peak / (1 - measured_margin(phase.tier, timeline.network).fraction), phase.tier))
    return max(needs, key=lambda need: need[0])[1]


def _out_of_memory_point(timeline: Timeline, batch_size: int, result: Replay) -> OutOfMemoryPoint | None:
    failure = result.failure
    if failure is None:
        return None
    block = timeline.blocks[timeline.events[failure.event]]
    return OutOfMemoryPoint(
        batch_size=batch_size,
        requested=failure.requested,
        allocated=failure.allocated,
        reserved=failure.reserved,
        fragmented=failure.reserved - failure.allocated,
        phase=timeline.phase_of(failure.event),
        module=block.module,
        source=block.source,
        operator=block.operator,
    )
