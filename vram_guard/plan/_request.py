"""What a plan is asked for, checked before anything is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan._purity import watched_modules
from vram_guard.plan.descriptions import Reason
from vram_guard.plan.descriptions import refused as refused_reason
from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY
from vram_guard.step import TrainingStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.parallel.links import Topology
    from vram_guard.plan.pins import Pins
    from vram_guard.plan.source import Source


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of :func:`vram_guard.plan.plan` that hold for every layout, checked.

    Attributes:
        batch_size: samples that the loader delivers at once, on one process.
        budget: what the allocator may reserve.
        capability: of the GPU that is meant; None: no GPU is known.
        allowed: techniques that may be taken as far as this request goes.
        refused: technique, or "grow" -> why this training does not allow it.
        pins: the parts of the plan that are fixed.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        cudnn: the choice of cuDNN, checked.
        compile_seconds: the limit for following a compiled step.

    The others are as :func:`vram_guard.plan.plan` has them.
    """

    batch_size: int
    budget: Budget
    capability: tuple[int, int] | None
    allowed: frozenset[str]
    refused: Mapping[str, object]
    pins: Pins
    blocks: tuple[str, ...] | None
    host_budget: str | int | None
    link: str | Topology | None
    grow: bool
    target_utilization: float
    lr_rule: str
    dataset_size: int | None
    settings: AllocatorSettings | None
    correction: float
    cudnn: str | None
    compile_seconds: float
    progress: Callable[[str], None]

    @property
    def techniques(self) -> frozenset[str]:
        """The techniques that are allowed and not refused."""
        return self.allowed - self.refused.keys()

    @property
    def reasons(self) -> dict[str, Reason]:
        """Allowed technique -> why it is refused."""
        return {name: refused_reason(name, why) for name, why in self.refused.items() if name in self.allowed}

    @property
    def may_checkpoint(self) -> bool:
        """True if blocks may be checkpointed, or are pinned to be."""
        return "checkpoint" in self.techniques or self.pins.checkpoint not in (None, "none", 0, ())

    @property
    def assumed_capability(self) -> tuple[int, int]:
        """The compute capability that traces are made for."""
        return self.capability or ASSUMED_COMPUTE_CAPABILITY

    @property
    def watched(self) -> Callable[[Any], Iterable[str]]:
        """Model -> the modules that the first trace watches for what they change."""
        return watched_modules(self.blocks if self.may_checkpoint else (), self.pins)


def check_not_planned(step: TrainingStep | Source) -> None:
    """Check that a step is as written.

    Raises:
        InvalidInputError: it has a recipe of a plan already.
    """
    if isinstance(step, TrainingStep) and step.recipe:
        raise InvalidInputError(
            _("step.recipe is for traces; a plan makes its own: leave it out, and pin what is fixed")
        )


def checked_correction(correction: object) -> float:
    """The factor for predicted peaks.

    Raises:
        InvalidInputError: it is no number of at least 1 and below 100.
    """
    if isinstance(correction, bool) or not isinstance(correction, int | float) or not 1 <= correction < 100:
        value = repr(correction)
        raise InvalidInputError(_("correction must be a factor of at least 1, such as 1.04, not {value}", value=value))
    return float(correction)


def environment_settings() -> AllocatorSettings | None:
    """The allocator settings that the planned training will run under, as far as they can be replayed."""
    from vram_guard.allocator import AllocatorSettings

    try:
        return AllocatorSettings.from_environment()
    except InvalidInputError:
        return None
