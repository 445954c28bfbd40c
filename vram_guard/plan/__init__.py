"""Plan: what to change in a training step so that it fits into a budget, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.errors import DeviceQueryError, InvalidInputError, NoDeviceError
from vram_guard.plan.learning_rate import LEARNING_RATE_RULES
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.options import Request
from vram_guard.plan.search import search
from vram_guard.plan.techniques import checked_techniques, mixed_precision, resident_batch
from vram_guard.step import checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline

__all__ = ["Plan", "Rejected", "plan"]

#: What is assumed of a GPU that nobody named: Ampere, the oldest generation with bfloat16.
ASSUMED_COMPUTE_CAPABILITY = (8, 0)


def plan(
    step: TrainingStep,
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = ("precision", "accumulate"),
    grow: bool = False,
    target_utilization: float = 0.8,
    lr_rule: str = "linear",
    dataset_size: int | None = None,
    settings: AllocatorSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The least change that makes the step fit, or, with ``grow``, the largest batch within the target.

    Args:
        step: the training step as written.
        batch_size: samples that the loader delivers at once, on one process.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name; with neither, the device at hand.
        margin: the share of the budget to leave free; None: the default.
        allow: what may be changed: "precision" (32-true to mixed), "accumulate" (smaller micro-batches).
        grow: where the step fits, enlarge the batch (whole multiples of it, precision and accumulation as
            written) and give the factor for the learning rate.
        target_utilization: the share of the memory that growth may fill, in (0, 1]; never beyond the budget.
        lr_rule: "linear", "sqrt" or "none".
        dataset_size: samples of one epoch over all processes; growth leaves at least one optimizer step.
        settings: the allocator's settings; None: PyTorch's defaults.
        progress: called with a line of text before each slow part.

    Returns:
        A Plan. Where nothing fits, ``fits`` is False and everything else is as written.

    Raises:
        InvalidInputError: an argument makes no sense; raised before anything is traced.
        NoDeviceError: no budget, no GPU name and no GPU here.
    """
    from vram_guard.budget import Budget

    batch_size = checked_count("batch_size", batch_size)
    techniques = checked_techniques(allow)
    _check_growth(target_utilization, lr_rule)
    if dataset_size is not None:
        dataset_size = checked_count("dataset_size", dataset_size)
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    capability = _compute_capability(resolved)
    mixed, why = None, "Mixed precision was not allowed."
    if "precision" in techniques:
        mixed, why = mixed_precision(step.precision, capability)
    request = Request(
        batch_size=batch_size,
        precision=step.precision,
        budget=resolved,
        mixed=mixed,
        mixed_why=why,
        may_accumulate="accumulate" in techniques and step.optimizer is not None,
        accumulate=step.accumulate,
        ranks=step.data_parallel_ranks,
        grow=grow,
        target_utilization=target_utilization,
        lr_rule=lr_rule,
        dataset_size=dataset_size,
        settings=settings,
    )
    traces = _Traces(step, batch_size, capability or ASSUMED_COMPUTE_CAPABILITY, progress or _silent)
    return search(request, traces)


def _compute_capability(budget: Budget) -> tuple[int, int] | None:
    """The budget's GPU's; for a bare amount, that of the device at hand; None: no GPU is known."""
    from vram_guard.budget import Budget

    if budget.compute_capability is not None:
        return budget.compute_capability
    try:
        return Budget.resolve().compute_capability
    except (NoDeviceError, DeviceQueryError):
        return None


def _check_growth(target_utilization: float, lr_rule: str) -> None:
    # Annotations stop nobody; a comparison with NaN is false.
    share: object = target_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidInputError(f"target_utilization must be above 0 and at most 1 (0.8 for 80%), not {share!r}")
    if lr_rule not in LEARNING_RATE_RULES:
        raise InvalidInputError(f"lr_rule must be one of {', '.join(LEARNING_RATE_RULES)}, not {lr_rule!r}")


def _silent(_line: str) -> None:
    """The progress of those who asked for none."""


class _Traces:
    """Timelines of one step under other precisions and splits, each traced when first asked for."""

    def __init__(
        self, step: TrainingStep, batch_size: int, capability: tuple[int, int], progress: Callable[[str], None]
    ) -> None:
        self._step = step
        self._batch_size = batch_size
        self._capability = capability
        self._progress = progress
        self._traced: dict[tuple[str, bool], Timeline] = {}

    def __call__(self, precision: str, splits: int) -> Timeline:
        if splits == 1:
            return self._trace(precision, split=False)
        # A step that already cuts its loaded batch into slices gets each slice cut again.
        slices = self._step.accumulate if self._step.whole_batch else 1
        return resident_batch(self._trace(precision, split=True), traced=2, resident=splits * slices)

    def _trace(self, precision: str, *, split: bool) -> Timeline:
        from vram_guard.simulate import trace

        key = (precision, split)
        if key not in self._traced:
            self._progress(f"tracing the step in {precision}{' in micro-batches' if split else ''}")
            changes = {"accumulate": 2, "whole_batch": True} if split else {}
            step = self._step.with_(precision=precision, **changes)
            # The law is checked where it is used: at the user's own batch size, and at the largest micro-batch.
            check_at = max(1, self._batch_size // 2) if split else self._batch_size
            self._traced[key] = trace(step, compute_capability=self._capability, check_at=check_at)
        return self._traced[key]
