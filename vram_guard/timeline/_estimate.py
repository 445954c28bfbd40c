"""Estimate: the memory that one training step takes at one batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vram_guard.budget import GPU, Budget
from vram_guard.budget.margins import MeasuredMargin, Network, measured_margin
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import FIRST_STEPS
from vram_guard.releases import Releases
from vram_guard.timeline._values import Category, CudnnAnswers, Leak, Note, Phase, PhasePeak, Tier, UpperReason
from vram_guard.units import format_bytes


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
        'backward'
    """

    batch_size: int
    peak_allocated: int
    """Bytes in live blocks at their maximum (``torch.cuda.max_memory_allocated``)."""
    peak_reserved: int
    """Bytes of segments at their maximum (``torch.cuda.max_memory_reserved``).

    Where it is not known how CUDA places segments on the card, the larger of both possibilities."""
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
    """The upper end of the reserved peak: with the most that unknown workspaces usually take, together or one in a
    segment of its own, and with frees that wait for other streams as late as they may be; 0 where there is neither."""
    peak_lower: int = 0
    """The smaller reserved peak where the placement of segments is not known and decides; 0 where it does not."""
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
    phases: tuple[PhasePeak, ...] = ()
    """The peak of each phase of the run, in order; empty where the step has no job, and so no other phases."""
    leaks: tuple[Leak, ...] = ()
    """Memory that grows from one training step to the next, the most first."""
    steps: int | None = None
    """Optimizer steps of the whole run, or as many as it has at least; None: not known."""
    elsewhere: Callable[[Budget], Estimate] | None = field(default=None, compare=False, repr=False)
    """The same on a budget's card; None: the step is not at hand. It stays in this process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "elsewhere": None}

    def __repr__(self) -> str:
        held = f"{format_bytes(self.peak_allocated)} allocated, {format_bytes(self.peak_reserved)} reserved"
        return f"<Estimate of batch size {self.batch_size}: {held}, {self.tier}>"

    def fits(self, budget: Budget | GPU | str | int, correction: float = 1.0) -> bool:
        """True if the step is known to stay within the budget, its margin kept.

        Args:
            budget: what the allocator may reserve: a Budget, an amount ("24GiB"), bytes, or a card's name, for which
                the step is traced again where that card's kernels take other memory.
            correction: what predicted peaks are multiplied by, where earlier runs took more than predicted.

        Raises:
            InvalidInputError: no such card or amount; or a card's name where the step is not at hand to be traced for
                it, as of an estimate that has been to a file or another process.
        """
        if isinstance(budget, Budget):
            return budget.holds(self.corrected(correction), self.tier, self.network)
        held = Budget.of(budget)
        if held.gpu is None:
            return self.fits(held, correction)
        if self.elsewhere is None:
            raise InvalidInputError(
                _("this estimate is of one card: ask vram_guard.estimate(...).fits({name})", name=repr(held.gpu.name))
            )
        return self.elsewhere(held).fits(held, correction)

    @property
    def bound(self) -> int:
        """Bytes that 99% of the measured runs of such networks stay below, where this is their prediction.

        The runs are those of :attr:`measured`. The margin of a budget is that of 90%, see docs/lab/accuracy.md.
        """
        return int(self.peak_reserved / (1 - self.measured.rarely))

    @property
    def measured(self) -> MeasuredMargin:
        """The measured runs that say how far such predictions may be too low."""
        return measured_margin(self.tier, self.network)

    @property
    def first_steps(self) -> tuple[int, int]:
        """Peak allocated and reserved until the end of the first training steps: the whole run's where that is all."""
        at = next((index for index, phase in enumerate(self.phases, 1) if phase.name == "training"), 0)
        if not at:
            return self.peak_allocated, self.peak_reserved
        until = self.phases[:at]
        return max(phase.peak_allocated for phase in until), max(phase.peak_reserved for phase in until)

    def steps_until_full(self, budget: Budget) -> int | None:
        """Optimizer steps after which leaks have filled the budget; None where nothing grows."""
        if not self._grows:
            return None
        return FIRST_STEPS + max(0, budget.usable - self.peak_reserved) // self._grows

    @property
    def _grows(self) -> int:
        """Bytes with every step."""
        return sum(leak.bytes_per_step for leak in self.leaks)

    @property
    def grown(self) -> int:
        """Bytes that leaks have added by the last step of the run; 0 also where the number of steps is not known."""
        return self._grows * max(0, (self.steps or 0) - FIRST_STEPS)

    def corrected(self, correction: float) -> int:
        """The reserved peak as it is compared with a budget, in bytes: with what leaks add until the run ends."""
        return int(self.peak_reserved * correction) + self.grown
