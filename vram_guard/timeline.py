"""Timeline: every allocation and free of a training step; Estimate: its peak at one batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

from vram_guard.allocator import AllocatorSettings, Replay, host_peak, replay
from vram_guard.budget.margins import Network
from vram_guard.checks import checked_count
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.releases.installed import Releases
from vram_guard.scratch import Card, Rule

if TYPE_CHECKING:
    from vram_guard.budget import GPU, Budget
    from vram_guard.language import Message
    from vram_guard.parallel.spec import Parallel

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer_states",
    "activations",
    "batch",
    "temporaries",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

#: Which workspaces of convolutions count: those of known size; also those of unknown size, each with the most that it
#: may take; or none.
Workspaces = Literal["known", "most", "none"]

#: When memory that another stream uses is free again: where the program frees it, or as late as it may be.
Frees = Literal["at once", "late"]

PhaseName = Literal["setup", "batch", "forward", "backward", "optimizer"]

#: How an answer came about. "symbolic": every operator's memory is known exactly. "partly symbolic": some
#: sizes are bounds (they depend on data) or some operators ran on stand-in data. "formula": the step could
#: not be followed to its end; the number is a lower bound and never a promise that the step fits.
Tier = Literal["symbolic", "partly symbolic", "formula"]


class Affine(NamedTuple):
    """``base + per_sample * batch_size``."""

    base: int
    per_sample: int

    def at(self, batch_size: int) -> int:
        """The value at this batch size."""
        return self.base + self.per_sample * batch_size


class Scratch(NamedTuple):
    """A temporary whose size is a step in the batch size and depends on the card; bytes are what its rule says."""

    rule: Rule
    quantities: tuple[Affine, ...]
    """What the rule is asked with: sizes and strides of the operands."""

    def bytes_at(self, batch_size: int, card: Card) -> int:
        """Requested bytes at this batch size on this card."""
        return self.rule.bytes(tuple(quantity.at(batch_size) for quantity in self.quantities), card)


#: What a block is taken for where no card is named: NVIDIA A100, as a trace.
ASSUMED_CARD = Card((8, 0), 108)


class Block(NamedTuple):
    """One allocation of the caching allocator, from alloc to free."""

    size: Affine
    """Requested bytes, before the allocator's rounding."""
    category: Category
    module: str
    """Dotted path of the module whose forward (or whose backward) asked for it; "" outside any module."""
    source: str
    """"file.py:123", the innermost line outside torch; "" where there is none."""
    operator: str
    """"aten.addmm.default"; "" for what stands before the first operator."""
    optional: bool = False
    """A library's workspace: where it does not fit, the library takes a way that needs none."""
    scratch: Scratch | None = None
    """What decides over the size instead of ``size``."""
    unknown: bool = False
    """A workspace of unknown size; ``size``, the most of usual kernels, counts in a peak's upper end alone."""
    stream: int = 0
    """The CUDA stream whose pool it is taken from, numbered as the step meets them; 0: the default stream."""

    def bytes_at(self, batch_size: int, card: Card = ASSUMED_CARD) -> int:
        """Requested bytes at this batch size on this card; 0 where the size is unknown."""
        if self.unknown:
            return 0
        if self.scratch is not None:
            return self.scratch.bytes_at(batch_size, card)
        return self.size.base + self.size.per_sample * batch_size


class HostBlock(NamedTuple):
    """One tensor in host memory."""

    size: Affine
    """Requested bytes."""
    pinned: bool = False
    """In page-locked memory, whose allocator rounds up."""


class Phase(NamedTuple):
    """A stretch of the timeline: it begins at ``events[start]`` and ends where the next one begins."""

    name: PhaseName
    step: int
    """Optimizer step, from 1; 0 for set-up."""
    start: int


class Deferred(NamedTuple):
    """A free of memory that another stream uses (``Tensor.record_stream``): the GPU decides when it happens."""

    free: int
    """Index of the event; at the earliest it happens there."""
    until: int
    """Index of the event before which it has surely happened."""


#: Why a reserved peak has a range. "workspaces": cuDNN's are of unknown size; "streams": frees wait for other streams.
UpperReason = Literal["workspaces", "streams"]

#: The name of what synchronised batch normalisation does with the other processes.
SYNCHRONISED_NORM = "SyncBatchNorm"


class Collective(NamedTuple):
    """A call for which this process waits for others."""

    name: str
    """As ``torch.distributed`` names it, or :data:`SYNCHRONISED_NORM`."""
    source: str
    """The line of the user's code, as "folder/file.py:123"; "" where there is none."""
    phase: PhaseName
    step: int
    """Optimizer step, from 1; 0 for set-up."""
    bytes: Affine = Affine(0, 0)
    """The larger side on this rank: what is gathered, or what is reduced."""
    ranks: int = 1
    """Ranks that take part; 1 where that is not known."""
    dimension: str = ""
    """The dimension of the device mesh along which they lie ("shard", "tensor", ...); "" where it has no name."""
    stream: int = 0
    """The stream on which it was started."""
    micro_batch: int = 0
    """The micro-batch of the optimizer step, from 0."""
    position: int = 0
    """So many entries of :attr:`Timeline.work` precede it."""
    by_layout: bool = False
    """Called by what spreads the step over ranks (DistributedDataParallel, FSDP), not by the step's own code."""
    after: int = -1
    """Entries of the work that have to be done before it can begin; -1: not known."""
    needed: int = -1
    """Entries of the work that precede the first one that waits for it; -1: not known."""


#: What an operator computes with. "vector": ordinary cores, a few operations an element, so that memory decides;
#: "fp32", "fp64": matrix products on ordinary cores; "3xtf32": float32 in three passes of TF32; "host": the CPU.
Unit = Literal["vector", "fp32", "tf32", "3xtf32", "fp16", "bf16", "fp64", "host"]


class Work(NamedTuple):
    """The computation and the memory traffic of one operator of the second training step."""

    operator: str
    """"aten.addmm.default"."""
    module: str
    """Dotted path of the module whose forward (or whose backward) ran it; "" outside any module."""
    phase: PhaseName
    recomputed: bool
    """Part of a forward that runs again inside the backward pass (activation checkpointing)."""
    flops: Affine
    moved: Affine
    """Bytes read and written, each tensor once."""
    unit: Unit
    launches: int = 1
    """Kernels it starts."""
    transfer: Affine = Affine(0, 0)
    """Bytes between host and device."""
    micro_batch: int = 0
    """The micro-batch of the optimizer step, from 0; the optimizer's own work belongs to the last one."""


#: What a forward changes: "tensor": an attribute that is neither parameter nor buffer; "object": a container, a helper
#: object or a class; "elsewhere": a tensor that was made before and is nothing of the module's.
ChangeKind = Literal["parameter", "buffer", "tensor", "object", "generator", "input", "elsewhere"]


class Change(NamedTuple):
    """Something that each forward of a watched module changes, and a second forward would change again."""

    module: str
    """As in ``model.named_modules()``."""
    kind: ChangeKind
    name: str
    """As seen from the module ("codebook.embedding"); "" where it has none."""


class Note(NamedTuple):
    """Something the reader of an answer has to know: what was bounded, assumed or left out, and where."""

    said: Message | str
    source: str = ""
    operator: str = ""
    from_values: bool = False
    """Sizes were read from the values in the batch that was given, so that they hold for that batch alone."""

    @property
    def message(self) -> str:
        """The message in the reader's language."""
        return str(self.said)

    def __str__(self) -> str:
        return f"{self.message} ({self.source})" if self.source else self.message


class CudnnAnswers(NamedTuple):
    """The cuDNN that was asked for the workspaces of a step's convolutions."""

    release: str
    """"9.26.0"; "" where it could not be loaded."""
    refused: str = ""
    """Why it gave no answers, with its status where it has one; "" where it answered."""


@dataclass(frozen=True)
class OutOfMemoryPoint:
    """The point at which a replay under a capacity limit fails, as ``torch.OutOfMemoryError`` would."""

    batch_size: int
    requested: int
    """Bytes of the request that failed."""
    allocated: int
    reserved: int
    fragmented: int
    """Reserved but free bytes that could not serve the request."""
    phase: Phase
    module: str
    source: str
    operator: str


@dataclass(frozen=True)
class Estimate:
    """The memory that one training step takes at one batch size.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> taken = trace(step).at(1000)
        >>> taken.peak_reserved >= taken.peak_allocated == sum(taken.breakdown.values())
        True
        >>> taken.peak_phase.name
        'forward'
    """

    batch_size: int
    peak_allocated: int
    """Bytes in live blocks at their maximum (``torch.cuda.max_memory_allocated``)."""
    peak_reserved: int
    """Bytes of segments at their maximum (``torch.cuda.max_memory_reserved``)."""
    breakdown: Mapping[Category, int]
    """Category -> bytes alive at the allocated peak; sums to ``peak_allocated``."""
    by_module: Mapping[str, int]
    """Module path -> bytes alive at the allocated peak; sums to ``peak_allocated``."""
    peak_phase: Phase
    peak_module: str
    peak_source: str
    peak_operator: str
    tier: Tier
    notes: tuple[Note, ...] = ()
    out_of_memory: OutOfMemoryPoint | None = None
    """Set when a capacity was given and the step does not fit it; the peaks are then those reached until there."""
    host_peak: int = 0
    """Bytes of host memory in what the step moves there (offload) at their maximum; pinned memory as it is rounded."""
    releases: Releases | None = field(default=None, compare=False)
    """The releases that this holds for; None where that is not known."""
    peak_upper: int = 0
    """The upper end of the reserved peak: with the most that usual kernels take as unknown workspaces, and with frees
    that wait for other streams as late as they may be; 0 where there is neither."""
    upper_reasons: tuple[UpperReason, ...] = ()
    """What ``peak_upper`` allows for."""
    by_stream: tuple[int, ...] = ()
    """Bytes alive at the allocated peak on each CUDA stream, the default one first; empty where there is no other."""
    network: Network | None = None
    """The kind of network, by the operators of the step; None: not known."""
    cudnn: CudnnAnswers | None = None
    """The cuDNN that was asked for workspaces; None: none was."""
    cudnn_bytes: int = 0
    """Bytes that its answers add to the reserved peak."""

    def fits(self, budget: Budget, correction: float = 1.0) -> bool:
        """True if the step is known to stay within the budget.

        Args:
            budget: what the allocator may reserve.
            correction: what predicted peaks are multiplied by, where earlier runs took more than predicted.
        """
        return budget.holds(self.corrected(correction), self.tier, self.network)

    def corrected(self, correction: float) -> int:
        """The reserved peak as it is compared with a budget, in bytes."""
        return int(self.peak_reserved * correction)


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
    precision: str = "32-true"
    work: tuple[Work, ...] = field(default=(), repr=False)
    """Computation and traffic of the operators of the second step, in order; empty where that is not known."""
    host_blocks: tuple[HostBlock, ...] = ()
    """Blocks that the step puts into host memory."""
    host_events: tuple[int, ...] = ()
    """As ``events``, for ``host_blocks``."""
    changes: tuple[Change, ...] = ()
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
    retrace: Callable[[int], Timeline] | None = field(default=None, repr=False, compare=False)
    """Set where the sequence itself differs between batch sizes: then each size asked for is traced."""

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

    def on(self, multiprocessors: int | None) -> Timeline:
        """The same step on a card of the same compute capability with so many multiprocessors; None: unknown."""
        return self if multiprocessors == self.multiprocessors else replace(self, multiprocessors=multiprocessors)

    def sizes(self, batch_size: int, *, workspaces: Workspaces = "known") -> list[int]:
        """Requested bytes of every block at this batch size, in block order."""
        card = self.card
        sizes = [block.bytes_at(batch_size, card) for block in self.blocks]
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
    def upper_reasons(self) -> tuple[UpperReason, ...]:
        """Why the reserved peak has a range."""
        workspaces = any(block.unknown for block in self.blocks)
        return (*(("workspaces",) if workspaces else ()), *(("streams",) if self.deferred else ()))

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
        return self.retrace(batch_size).on(self.multiprocessors)

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

        Args:
            batch_size: samples per micro-batch.
            capacity: bytes the allocator may reserve; None: no limit.
            settings: the allocator's settings; None: PyTorch's defaults.
            curve: also record allocated and reserved bytes after every event.
            workspaces: those of convolutions that count.
            frees: when memory that other streams use is free again. "late" moves events: indices of the result are
                not those of ``events``.
        """
        timeline = self.exact(batch_size)
        # Without a limit everything fits, and nothing has to be done without.
        optional = () if capacity is None else {i for i, block in enumerate(timeline.blocks) if block.optional}
        return replay(
            timeline.late_events if frees == "late" else timeline.events,
            timeline.sizes(batch_size, workspaces=workspaces),
            settings=settings or AllocatorSettings(),
            capacity=capacity,
            curve=curve,
            streams=timeline.streams,
            optional=optional,
        )

    def at(
        self,
        batch_size: int,
        *,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> Estimate:
        """The memory that the step takes at this batch size. Milliseconds, unless the step has to be traced anew."""
        timeline = self.exact(checked_count("batch_size", batch_size))
        result = timeline.replay(batch_size, capacity=capacity, settings=settings)
        return replace(
            _estimate(timeline, batch_size, result),
            peak_upper=_upper(timeline, batch_size, settings),
            upper_reasons=timeline.upper_reasons,
            cudnn_bytes=_added_by_cudnn(timeline, batch_size, result.peak_reserved, settings),
        )

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

        def fits(batch_size: int) -> bool:
            peak = self.replay(batch_size, settings=settings).peak_reserved
            return held_against.holds(peak, self.tier, self.network)

        return largest_that_fits(fits, checked_count("limit", limit))


def _upper(timeline: Timeline, batch_size: int, settings: AllocatorSettings | None) -> int:
    """The upper end of the reserved peak; 0 where it has no range."""
    if not timeline.upper_reasons:
        return 0
    return timeline.replay(batch_size, settings=settings, workspaces="most", frees="late").peak_reserved


def _added_by_cudnn(timeline: Timeline, batch_size: int, reserved: int, settings: AllocatorSettings | None) -> int:
    """Bytes that an asked cuDNN's answers add to the reserved peak."""
    if timeline.cudnn is None or timeline.cudnn.refused:
        return 0
    return max(0, reserved - timeline.replay(batch_size, settings=settings, workspaces="none").peak_reserved)


def largest_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """The largest count in ``1..limit`` below which nothing was seen to fail; 0 if 1 does not fit.

    Doubles until it fails, then bisects: about ``2 log2(answer)`` calls.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
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
        tier=timeline.tier,
        notes=timeline.notes,
        out_of_memory=_out_of_memory_point(timeline, batch_size, result),
        host_peak=timeline.host_peak(batch_size),
        releases=timeline.releases,
        network=timeline.network,
        cudnn=timeline.cudnn,
        by_stream=tuple(by_stream) if timeline.streams else (),
    )


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


def merge_affine(low: Timeline, high: Timeline) -> Timeline | None:
    """One affine timeline from traces at two batch sizes, or None where they are not the same sequence.

    The two hold exact sizes (``per_sample`` 0). A size must grow by the same whole number of bytes for each
    sample, and may not shrink.
    """
    (small,), (large,) = low.traced, high.traced
    if low.events != high.events or len(low.blocks) != len(high.blocks) or low.deferred != high.deferred:
        return None
    span = large - small
    blocks = []
    for one, other in zip(low.blocks, high.blocks, strict=True):
        size = _line_through(one.size.base, other.size.base, small, span)
        scratch = _merged_scratch(one.scratch, other.scratch, small, span)
        if (scratch is None) != (one.scratch is None and other.scratch is None):
            return None
        if size is None or _kept(one) != _kept(other):
            return None
        blocks.append(one._replace(size=size, scratch=scratch))
    host_blocks = _merged_host(low, high)
    collectives = _merged_collectives(low, high)
    if host_blocks is None or collectives is None:
        return None
    return Timeline(
        blocks=tuple(blocks),
        events=low.events,
        phases=low.phases,
        traced=(small, large),
        tier=low.tier,
        notes=_union(low.notes, high.notes),
        compute_capability=low.compute_capability,
        multiprocessors=low.multiprocessors,
        precision=low.precision,
        work=_merged_work(low.work, high.work, small, large),
        host_blocks=host_blocks,
        host_events=low.host_events,
        changes=low.changes,
        collectives=collectives,
        deferred=low.deferred,
        releases=low.releases,
        network=high.network,
        cudnn=low.cudnn,
        parallel=low.parallel,
    )


def _kept(block: Block) -> tuple[object, ...]:
    """What a block has at every batch size."""
    return block.operator, block.category, block.unknown, block.stream


def _merged_scratch(one: Scratch | None, other: Scratch | None, small: int, span: int) -> Scratch | None:
    """The temporary at every batch size; None where the two are not of one rule, or there is none."""
    if one is None or other is None or one.rule != other.rule or len(one.quantities) != len(other.quantities):
        return None
    merged = []
    for low, high in zip(one.quantities, other.quantities, strict=True):
        line = _line_through(low.base, high.base, small, span)
        if line is None:
            return None
        merged.append(line)
    return Scratch(one.rule, tuple(merged))


def _merged_host(low: Timeline, high: Timeline) -> tuple[HostBlock, ...] | None:
    """The host's blocks at every batch size; None where they are not the same sequence."""
    if low.host_events != high.host_events or len(low.host_blocks) != len(high.host_blocks):
        return None
    (small,), (large,) = low.traced, high.traced
    blocks = []
    for one, other in zip(low.host_blocks, high.host_blocks, strict=True):
        size = _line_through(one.size.base, other.size.base, small, large - small)
        if size is None or one.pinned != other.pinned:
            return None
        blocks.append(HostBlock(size, one.pinned))
    return tuple(blocks)


def _merged_collectives(low: Timeline, high: Timeline) -> tuple[Collective, ...] | None:
    """The collectives at every batch size; None where a layout's are not the same sequence."""
    (small,), (large,) = low.traced, high.traced
    nothing = Affine(0, 0)
    one, other = ([each._replace(bytes=nothing) for each in timeline.collectives] for timeline in (low, high))
    if one != other:
        return low.collectives if low.parallel is None else None
    return tuple(
        each._replace(bytes=_near_line(each.bytes.base, twin.bytes.base, small, large))
        for each, twin in zip(low.collectives, high.collectives, strict=True)
    )


def _merged_work(low: Sequence[Work], high: Sequence[Work], small: int, large: int) -> tuple[Work, ...]:
    """Work at every batch size from two of them; none where the operators are not the same."""
    if len(low) != len(high) or any(one.operator != other.operator for one, other in zip(low, high, strict=True)):
        return ()
    return tuple(
        one._replace(
            flops=_near_line(one.flops.base, other.flops.base, small, large),
            moved=_near_line(one.moved.base, other.moved.base, small, large),
            launches=max(one.launches, other.launches),
            transfer=_near_line(one.transfer.base, other.transfer.base, small, large),
        )
        for one, other in zip(low, high, strict=True)
    )


def _near_line(low: int, high: int, small: int, large: int) -> Affine:
    """The line through two sizes, which never falls and is never below 0: work is a model, not a promise of bytes.

    What grows faster than the batch gets the line from 0 through the larger size.
    """
    if high <= low:
        return Affine(max(low, high), 0)
    per_sample = (high - low) // (large - small)
    base = high - per_sample * large
    return Affine(base, per_sample) if base >= 0 else Affine(0, -(-high // large))


def _line_through(low: int, high: int, small: int, span: int) -> Affine | None:
    per_sample, rest = divmod(high - low, span)
    base = low - per_sample * small
    if rest or per_sample < 0 or base < 0:
        return None
    return Affine(base, per_sample)


def _union(one: Sequence[Note], other: Sequence[Note]) -> tuple[Note, ...]:
    return tuple(dict.fromkeys((*one, *other)))
