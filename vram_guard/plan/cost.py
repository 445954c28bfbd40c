"""Cost: how long a training step is predicted to take, so that plans can be compared. A model, not a measurement.

A trace writes down what each operator of the second step computes and moves (:class:`vram_guard.timeline.Work`). Here
each takes the longest of three times, the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009) with a floor:

- its FLOPs over the peak of the unit that works on them (tensor cores in the operator's dtype, or ordinary cores);
- its bytes, read and written, over the memory bandwidth;
- its kernels, :data:`LAUNCH` apart.

The GPU works through them one after the other, and so do the copies between host and device: ``save_on_cpu`` copies on
the current stream, behind what was computed and before what needs it, whether its memory is pinned or not
(torch/autograd/graph.py), and a training loop loads its batch in the same way. Beside the GPU the host starts the
operators, :data:`HOST_PER_OPERATOR` each, ahead of the GPU (PyTorch, "CUDA semantics", asynchronous execution): the
longer of the two sums is the step. That is what makes tiny micro-batches expensive. What an optimizer computes in host
memory comes on top.

What the model ignores: peaks are never reached (both compute and memory reach some 80 to 90% of theirs, so ratios
suffer less than seconds do); caches, which make small tensors cheaper; tile and wave quantisation, which make odd
shapes dearer; waiting for the data loader, for ``.item()`` and for other GPUs; views, whose few microseconds on the
host are not counted; copies that a library overlaps with computing (FSDP's prefetching); power and clocks. Compare
plans of one step on one GPU with it. Do not read its seconds as a promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vram_guard.budget import GPU
from vram_guard.budget.catalogue import catalogue, find_gpu
from vram_guard.errors import InvalidInputError
from vram_guard.step import checked_count

if TYPE_CHECKING:
    from vram_guard.timeline import Timeline, Unit, Work

#: Seconds the host takes to start one operator in eager mode. Measured on an A100's host as 8 microseconds for ``add``
#: submitted back to back (github.com/flagos-ai/Torch-FL/pull/27); others report 5 to 7 for the simplest operators on
#: the CPU alone (github.com/pytorch/pytorch/issues/41383), Python included.
HOST_PER_OPERATOR = 8e-6

#: Seconds between two kernels that one operator starts itself: the driver's ``cudaLaunchKernel`` takes 1 to 3
#: microseconds (jiahuanglin.xyz, "From PyTorch op to kernel launch").
LAUNCH = 2e-6

#: Share of the link's bandwidth that copies reach from pinned memory. NVIDIA measured 6.0 of 8 GB/s on PCIe 2.0 x16
#: (CUDA FAQ, "peak transfer rates"); 11 of 15.75 GB/s are reported on PCIe 3.0 x16 (NVIDIA forum, topic 148400).
PINNED_SHARE = 0.75

#: The same from ordinary memory: 2.3 GB/s where pinned memory reaches 5.8 (M. Harris, "How to Optimize Data Transfers
#: in CUDA C/C++", NVIDIA blog 2012).
PAGEABLE_SHARE = PINNED_SHARE * 2.3 / 5.8

#: Bytes a second of host memory, for optimizers that run there: two channels of DDR4-3200 (JEDEC JESD79-4), a
#: desktop's. Servers have more channels; the host is not known here.
HOST_MEMORY_BANDWIDTH = 2 * 3200e6 * 8

#: A link to the host where the catalogue knows none: PCIe 4.0 x16.
ASSUMED_HOST_BANDWIDTH = 16 * 16e9 * 128 / 130 / 8

#: float64 matrix products relative to fp32 without tensor cores: data sheets of A100, H100 (tensor cores, as cuBLAS
#: uses them) and B200; else the CUDA C++ programming guide's table of arithmetic throughput.
_FP64_SHARE: Mapping[tuple[int, int], float] = {
    (6, 0): 1 / 2,
    (7, 0): 1 / 2,
    (8, 0): 1,
    (9, 0): 1,
    (10, 0): 1 / 2,
    (6, 1): 1 / 32,
    (7, 5): 1 / 32,
}
_FP64_ELSEWHERE = 1 / 64


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds, by what they are spent on. Times of parts of a step add up.

    Attributes:
        compute: operators that arithmetic limits.
        memory: operators that memory bandwidth limits.
        kernels: operators that are shorter than starting their kernels.
        transfers: copies between host and device.
        host: work on host memory while the GPU waits (an optimizer that was moved there).
        dispatch: what the host takes to start everything, beside the GPU's own time.
        assumptions: what was assumed because it is not known, in sentences.
    """

    compute: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    transfers: float = 0.0
    host: float = 0.0
    dispatch: float = 0.0
    assumptions: tuple[str, ...] = ()

    @property
    def device(self) -> float:
        """Seconds in which the GPU or its link is busy."""
        return self.compute + self.memory + self.kernels + self.transfers

    @property
    def launches(self) -> float:
        """Seconds lost to starting work: short kernels, and the GPU waiting for the host."""
        return self.kernels + max(0.0, self.dispatch - self.device)

    @property
    def seconds(self) -> float:
        """The whole: the GPU's time or the host's, whichever is longer, and the host's own work."""
        return max(self.device, self.dispatch) + self.host

    def __add__(self, other: StepTime) -> StepTime:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _PARTS}
        return StepTime(**sums, assumptions=tuple(dict.fromkeys((*self.assumptions, *other.assumptions))))

    def times(self, count: float) -> StepTime:
        """The same, ``count`` times."""
        return StepTime(**{name: getattr(self, name) * count for name in _PARTS}, assumptions=self.assumptions)


_PARTS = tuple(field.name for field in fields(StepTime) if field.name != "assumptions")


# --- whole steps ---------------------------------------------------------------------------------------------------


def step_seconds(
    timeline: Timeline, batch_size: int, gpu: GPU | str | None = None, *, micro_batches: int | None = None
) -> StepTime:
    """The predicted time of one optimizer step.

    Args:
        timeline: of the step, or of the step under some option (its own trace counts its own casts, recomputation and
            copies).
        batch_size: samples of one micro-batch.
        gpu: the card, by name or from the catalogue; None: :func:`assumed_gpu` of the timeline's compute capability.
        micro_batches: of one optimizer step, each of ``batch_size`` samples; None: as many as were traced. Later ones
            take as long as the second one did; where only one was traced, as the first one and adding up gradients.

    Raises:
        InvalidInputError: the timeline holds no work, or an argument makes no sense.
    """
    checked_count("batch_size", batch_size)
    timeline = timeline.exact(batch_size)
    if not timeline.work:
        raise InvalidInputError(
            "this timeline does not say what the step computes (it was not made by trace(), or its operators differ "
            "between batch sizes): trace the step at this batch size"
        )
    card, assumptions = _card(gpu, timeline.compute_capability)
    if timeline.tier == "formula":
        assumptions = (*assumptions, "the step could not be followed to its end: its time is a lower bound")
    traced = 1 + max(work.micro_batch for work in timeline.work)
    count = traced if micro_batches is None else checked_count("micro_batches", micro_batches)
    loading, first, later, once = (_sum(part, batch_size, card) for part in _parts(timeline.work))
    total = loading.times(count / traced) + first + once
    if count > 1:
        more = later.times(1 / (traced - 1)) if traced > 1 else first + _adding_up(timeline, batch_size, card)
        total += more.times(count - 1)
    return total + StepTime(assumptions=assumptions)


def relative_cost(option: StepTime, as_written: StepTime) -> float:
    """How many times as long the step takes under an option; both for the same number of samples."""
    if as_written.seconds == 0:
        raise InvalidInputError("the step as written takes no time at all: there is nothing to compare with")
    return option.seconds / as_written.seconds


def _parts(work: Iterable[Work]) -> tuple[list[Work], ...]:
    """Loading, the first micro-batch, all later ones, and what happens once a step."""
    loading: list[Work] = []
    first: list[Work] = []
    later: list[Work] = []
    once: list[Work] = []
    for item in work:
        if item.phase == "batch":
            loading.append(item)
        elif item.phase in ("optimizer", "setup"):
            once.append(item)
        else:
            (later if item.micro_batch else first).append(item)
    return loading, first, later, once


def _adding_up(timeline: Timeline, batch_size: int, gpu: GPU) -> StepTime:
    """Adding a second micro-batch's gradients to the first one's: two read, one written, for each parameter."""
    start = next((phase.start for phase in timeline.phases if phase.step == 2), 0)
    made = {event for event in timeline.events[start:] if event >= 0}
    sizes = [block.bytes_at(batch_size) for i, block in enumerate(timeline.blocks) if i in made and _gradient(block)]
    return StepTime(memory=3 * sum(sizes) / gpu.memory_bandwidth, dispatch=len(sizes) * HOST_PER_OPERATOR)


def _gradient(block: object) -> bool:
    return getattr(block, "category", "") == "gradients"


# --- parts, for options that nobody has traced ----------------------------------------------------------------------


def recompute_seconds(
    work: Iterable[Work],
    modules: Iterable[str],
    batch_size: int,
    gpu: GPU | str | None = None,
    *,
    micro_batches: int = 1,
) -> StepTime:
    """What checkpointing these modules adds to a step that was traced without it: their forward once more.

    A little more than the truth: torch stops a recomputation at the last tensor that the backward pass needs.

    Args:
        work: of the step as written.
        modules: dotted paths; what runs inside a module belongs to it.
        batch_size: samples of one micro-batch.
        gpu: the card; None: an A100's compute capability is assumed, see :func:`assumed_gpu`.
        micro_batches: of one optimizer step.
    """
    chosen = frozenset(modules)
    inside: dict[str, bool] = {}
    again = []
    for item in work:
        if item.phase == "forward" and item.micro_batch == 0 and not item.recomputed:
            if item.module not in inside:
                inside[item.module] = not chosen.isdisjoint(_ancestors(item.module))
            if inside[item.module]:
                again.append(item)
    card, assumptions = _card(gpu, (8, 0))
    return _sum(again, batch_size, card).times(micro_batches) + StepTime(assumptions=assumptions)


def forward_seconds_by_module(
    work: Iterable[Work], batch_size: int, gpu: GPU | str | None = None
) -> dict[str, StepTime]:
    """Forward time of each module's own operators (not those of the modules inside it), for one micro-batch."""
    card, assumptions = _card(gpu, (8, 0))
    own: dict[str, list[Work]] = {}
    for item in work:
        if item.phase == "forward" and item.micro_batch == 0 and not item.recomputed:
            own.setdefault(item.module, []).append(item)
    return {path: _sum(part, batch_size, card) + StepTime(assumptions=assumptions) for path, part in own.items()}


def offload_seconds(
    size: int, gpu: GPU | str | None = None, *, pinned: bool = True, both_ways: bool = True
) -> StepTime:
    """What moving ``size`` bytes to the host, and back if ``both_ways``, adds to a step. It overlaps with nothing."""
    card, assumptions = _card(gpu, (8, 0))
    rate, unknown = _link(card, pinned=pinned)
    return StepTime(transfers=(2 if both_ways else 1) * size / rate, assumptions=(*assumptions, *unknown))


def _ancestors(path: str) -> Iterable[str]:
    """A module's path, and the paths of all modules around it: "a.b" gives "a.b", "a" and ""."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


# --- one operator --------------------------------------------------------------------------------------------------


def _sum(work: Iterable[Work], batch_size: int, gpu: GPU) -> StepTime:
    compute = memory = kernels = transfers = host = dispatch = 0.0
    rates: dict[Unit, float] = {}
    bandwidth = float(gpu.memory_bandwidth)
    link, unknown = _link(gpu, pinned=True)
    assumptions: dict[str, None] = {}
    for item in work:
        unit = item.unit
        moved = item.moved.base + item.moved.per_sample * batch_size
        if unit == "host":
            host += moved / HOST_MEMORY_BANDWIDTH
            assumptions[_HOST_ASSUMED] = None
            continue
        dispatch += HOST_PER_OPERATOR + (item.launches - 1) * LAUNCH
        transfer = item.transfer.base + item.transfer.per_sample * batch_size
        if transfer:
            transfers += transfer / link
            assumptions.update(dict.fromkeys(unknown))
            continue
        by_bytes, by_kernels = moved / bandwidth, item.launches * LAUNCH
        by_flops = 0.0
        if unit != "vector":
            rate = rates.get(unit)
            if rate is None:
                rate = rates[unit] = flops_per_second(gpu, unit)
            by_flops = (item.flops.base + item.flops.per_sample * batch_size) / rate
        if by_flops >= by_bytes and by_flops >= by_kernels:
            compute += by_flops
        elif by_bytes >= by_kernels:
            memory += by_bytes
        else:
            kernels += by_kernels
    return StepTime(compute, memory, kernels, transfers, host, dispatch, tuple(assumptions))


_HOST_ASSUMED = "host memory is taken for two channels of DDR4-3200, 51.2 GB/s"


def flops_per_second(gpu: GPU, unit: Unit) -> float:
    """The peak of what works on an operator; a card without such tensor cores does it on its ordinary ones."""
    if unit == "fp64":
        return gpu.fp32_flops * _FP64_SHARE.get(gpu.compute_capability, _FP64_ELSEWHERE)
    if unit == "3xtf32":
        return gpu.tf32_flops / 3 if gpu.tf32_flops is not None else gpu.fp32_flops
    tensor_cores = {"tf32": gpu.tf32_flops, "fp16": gpu.fp16_flops, "bf16": gpu.bf16_flops}.get(unit)
    return tensor_cores if tensor_cores is not None else gpu.fp32_flops


def _link(gpu: GPU, *, pinned: bool) -> tuple[float, tuple[str, ...]]:
    share = PINNED_SHARE if pinned else PAGEABLE_SHARE
    if gpu.host_bandwidth is None:
        why = f"the link between {gpu.name} and its host is not known: PCIe 4.0 x16 is assumed"
        return ASSUMED_HOST_BANDWIDTH * share, (why,)
    return gpu.host_bandwidth * share, ()


# --- which card ----------------------------------------------------------------------------------------------------


def assumed_gpu(compute_capability: tuple[int, int]) -> GPU:
    """The card that stands for a compute capability while nobody names one: the slowest that has it.

    Where the catalogue has no such card, the newest older capability stands in, or the oldest there is.
    """
    known = sorted({gpu.compute_capability for gpu in catalogue()})
    nearest = max((one for one in known if one <= compute_capability), default=known[0])
    same = (gpu for gpu in catalogue() if gpu.compute_capability == nearest)
    return min(same, key=lambda gpu: (gpu.fp32_flops, gpu.memory_bandwidth, gpu.name))


def _card(gpu: GPU | str | None, compute_capability: tuple[int, int]) -> tuple[GPU, tuple[str, ...]]:
    if isinstance(gpu, GPU):
        return gpu, ()
    if gpu is not None:
        return find_gpu(gpu), ()
    assumed = assumed_gpu(compute_capability)
    major, minor = compute_capability
    return assumed, (f"no GPU is named: times are relative, on a {assumed.name} (compute capability {major}.{minor})",)
