"""Roofline: the time of single operators on a card, and what it is made of (see :mod:`vram_guard.plan.step_time`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from vram_guard.budget import GPU
from vram_guard.language import _, marked
from vram_guard.timeline import Unit, Work

#: Seconds the host takes to start one operator without autograd, as an optimizer does. Measured on an A100's host as 8
#: microseconds for ``add`` submitted back to back (github.com/flagos-ai/Torch-FL/pull/27); others report 5 to 7 for the
#: simplest operators on the CPU alone (github.com/pytorch/pytorch/issues/41383), Python included.
HOST_PER_OPERATOR = 8e-6

# The three that follow are medians of five networks on one core of a server, torch 2.13 (docs/lab/cost-model.md).
# The host of an H100 took 43 microseconds, 1.8 milliseconds and 53 microseconds: as with the GPU's peaks, the faster
# counts.

#: The same for an operator of the forward or the backward pass, with what goes with it: the modules' Python, views,
#: autograd. 15 to 36 microseconds.
HOST_PER_TRAINED_OPERATOR = 22e-6

#: What each call of a checkpointed module takes beside its operators: states of generators, hooks around every tensor
#: that autograd saves, the exception that ends a second forward. 0.7 to 1.3 milliseconds.
HOST_PER_CHECKPOINTED_CALL = 0.93e-3

#: What selective checkpointing adds to an operator in each of a block's two forwards, in which every operator passes
#: through Python. 36 to 75 microseconds.
HOST_PER_SELECTED_OPERATOR = 52e-6

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
        communication: the GPU waiting for other GPUs: the part of collectives that computing does not hide.
    """

    compute: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    transfers: float = 0.0
    host: float = 0.0
    dispatch: float = 0.0
    assumptions: tuple[str, ...] = ()
    communication: float = 0.0

    @property
    def device(self) -> float:
        """Seconds in which the GPU or its link is busy, or waits for other GPUs."""
        return self.compute + self.memory + self.kernels + self.transfers + self.communication

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


@dataclass(frozen=True)
class Communication:
    """Seconds of the collectives of one optimizer step on one rank.

    Attributes:
        seconds: of all of them, whether they are hidden or not.
        exposed: in which the rank waits.
        calls: how many.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    calls: int = 0

    def __add__(self, other: Communication) -> Communication:
        return Communication(self.seconds + other.seconds, self.exposed + other.exposed, self.calls + other.calls)

    def times(self, count: float) -> Communication:
        """The same, ``count`` times."""
        return Communication(self.seconds * count, self.exposed * count, round(self.calls * count))

    @property
    def step_time(self) -> StepTime:
        """The part of a step's time that it makes."""
        return StepTime(communication=self.exposed, dispatch=self.calls * HOST_PER_OPERATOR)


def beside(copies: StepTime, work: StepTime) -> StepTime:
    """What copies on a stream of their own add to the work that goes on meanwhile: what is left when that is done."""
    exposed = max(0.0, copies.transfers - work.device - work.host)
    return StepTime(transfers=exposed, dispatch=copies.dispatch, assumptions=copies.assumptions)


def total_time(work: Iterable[Work], batch_size: int, gpu: GPU) -> StepTime:
    """The time of some work at a batch size, its parts added up."""
    compute = memory = kernels = transfers = host = dispatch = 0.0
    rates: dict[Unit, float] = {}
    bandwidth = float(gpu.memory_bandwidth)
    link, unknown = link_rate(gpu, pinned=True)
    assumptions: dict[str, None] = {}
    for item in work:
        unit = item.unit
        moved = item.moved.base + item.moved.per_sample * batch_size
        if unit == "host":
            host += moved / HOST_MEMORY_BANDWIDTH
            assumptions[_(_HOST_ASSUMED)] = None
            continue
        dispatch += host_seconds(item)
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


def host_seconds(item: Work) -> float:
    """Seconds the host takes to start an operator and its kernels."""
    trained = item.phase in ("forward", "backward")
    return (HOST_PER_TRAINED_OPERATOR if trained else HOST_PER_OPERATOR) + (item.launches - 1) * LAUNCH


_HOST_ASSUMED = marked("host memory is assumed to be two channels of DDR4-3200, 51.2 GB/s")


def flops_per_second(gpu: GPU, unit: Unit) -> float:
    """The peak of what works on an operator; a card without such tensor cores does it on its ordinary ones."""
    if unit == "fp64":
        return gpu.fp32_flops * _FP64_SHARE.get(gpu.compute_capability, _FP64_ELSEWHERE)
    if unit == "3xtf32":
        return gpu.tf32_flops / 3 if gpu.tf32_flops is not None else gpu.fp32_flops
    tensor_cores = {"tf32": gpu.tf32_flops, "fp16": gpu.fp16_flops, "bf16": gpu.bf16_flops}.get(unit)
    return tensor_cores if tensor_cores is not None else gpu.fp32_flops


def link_rate(gpu: GPU, *, pinned: bool) -> tuple[float, tuple[str, ...]]:
    """Bytes a second that copies between host and card reach, and what was assumed."""
    share = PINNED_SHARE if pinned else PAGEABLE_SHARE
    if gpu.host_bandwidth is None:
        why = _("the link between {name} and its host is not known: PCIe 4.0 x16 is assumed", name=gpu.name)
        return ASSUMED_HOST_BANDWIDTH * share, (why,)
    return gpu.host_bandwidth * share, ()
