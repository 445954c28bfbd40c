"""What a plan may be told besides the step, the memory and the techniques."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.plan.checks import check_growth
from vram_guard.step import checked_count

if TYPE_CHECKING:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.parallel.links import Topology


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of :func:`vram_guard.plan` that most plans leave as they are.

    Args:
        refused: technique, or "grow" -> why it cannot be applied to this training: left out, and the plan says so.
        blocks: names of the modules that may be checkpointed or offloaded; None: repeated modules are found.
        host_budget: host memory that techniques may take: "64GiB" or bytes; None: what is free here now.
        target_utilization: the share of the memory that growth may fill, in (0, 1]; never beyond the budget.
        lr_rule: "linear", "sqrt", "none" or "auto" ("linear" for SGD, "sqrt" for Adam-like optimizers).
        dataset_size: samples of one epoch over all processes; growth leaves at least one optimizer step.
        settings: the allocator's settings; None: those of this process's environment (PYTORCH_CUDA_ALLOC_CONF), or
            PyTorch's defaults where it has none, or some that cannot be replayed.
        correction: what predicted peaks are multiplied by, at least 1, where earlier runs took more than predicted.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.simulate.trace`.
        node: of a training over ``gpus``: GPUs of a node; None: 8.
        link: what connects the GPUs of a node, and the nodes, such as "nvlink,ib400"; None: what is usual for the card.
        layouts: the ways to spread that are tried, see :data:`vram_guard.plan.layouts.LAYOUTS`; None: all.

    Raises:
        InvalidInputError: an option of growth makes no sense; the others are checked with the step.

    Example:
        >>> PlanOptions(link="pcie", layouts=["ddp", "fsdp2"]).lr_rule
        'linear'
    """

    refused: Mapping[str, object] = field(default_factory=dict)
    blocks: Iterable[str] | None = None
    host_budget: str | int | None = None
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    dataset_size: int | None = None
    settings: AllocatorSettings | None = None
    correction: float = 1.0
    cudnn: str | None = None
    node: int | None = None
    link: str | Topology | None = None
    layouts: Iterable[str] | None = None

    def __post_init__(self) -> None:
        check_growth(self.target_utilization, self.lr_rule)
        if self.dataset_size is not None:
            checked_count("dataset_size", self.dataset_size)
