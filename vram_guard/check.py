"""A check that fails a build: does this training step still fit?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import GPU, Budget
from vram_guard.errors import DoesNotFitError, InvalidInputError
from vram_guard.language import _
from vram_guard.step import TrainingStep, checked_count
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import format_bytes


def assert_fits(
    step: TrainingStep | str,
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    settings: AllocatorSettings | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Estimate:
    """Raise an error where the step does not fit: it says what the step takes, where, and what would fit.

    No GPU is needed, and no memory for the weights: the step is run symbolically.

    Args:
        step: the training step, or the name of one: ``"package.module:function"``, ``"train.py:function"``.
        batch_size: samples per micro-batch.
        budget: what PyTorch's allocator may reserve: "24GiB", bytes, a Budget.
        gpu: a whole card by name; with neither, this machine's device.
        margin: the share of the budget to leave free; None: the default.
        settings: the allocator's settings; None: those of the environment.
        arguments: for the function that a name stands for.

    Returns:
        The estimate, for checks of one's own.

    Raises:
        DoesNotFitError: it does not fit, or is not known to fit.
        InvalidInputError: an argument makes no sense; before anything is traced.
        NoDeviceError: no budget, no GPU name and no GPU here.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> assert_fits(step, 1000, "64MiB").batch_size
        1000
        >>> assert_fits(step, 30000, "64MiB", margin=0)
        Traceback (most recent call last):
        vram_guard.errors.DoesNotFitError: batch size 30000 does not fit: 82.00 MiB needed, 18.00 MiB too much...
    """
    estimate, timeline, held_against = checked(
        step, batch_size, budget, gpu=gpu, margin=margin, settings=settings, arguments=arguments
    )
    raise_unless_it_fits(estimate, timeline, held_against, settings)
    return estimate


def checked(
    step: TrainingStep | str,
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    settings: AllocatorSettings | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[Estimate, Timeline, Budget]:
    """The estimate that :func:`assert_fits` judges, its timeline, and the budget for its tier."""
    size = checked_count("batch_size", batch_size)
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    if isinstance(step, str):
        from vram_guard.capture.object_reference import load_step

        step = load_step(step, arguments)
    if not isinstance(step, TrainingStep):
        raise InvalidInputError(
            _("step must be a TrainingStep or the name of one, not {type}", type=type(step).__name__)
        )
    from vram_guard.plan.layout_facts import budget_of_rank
    from vram_guard.simulate import trace

    resolved = budget_of_rank(resolved, step.layout)
    timeline = trace(step, budget=resolved)
    estimate = timeline.at(size, settings=settings or AllocatorSettings.from_environment())
    return estimate, timeline, resolved.for_tier(estimate.tier, estimate.network)


def raise_unless_it_fits(
    estimate: Estimate, timeline: Timeline, budget: Budget, settings: AllocatorSettings | None = None
) -> None:
    """Raise what :func:`assert_fits` raises.

    Raises:
        DoesNotFitError: the estimate is above the budget's usable bytes, or only a lower bound.
    """
    from vram_guard.report.words import held_at_peak, peak_place

    if estimate.fits(budget):
        return
    peak, usable = estimate.peak_reserved, budget.usable
    if peak > usable:
        verdict = _("{peak} needed, {over} too much", peak=format_bytes(peak), over=format_bytes(peak - usable))
    else:
        verdict = _("at least {peak} needed: the step could not be followed to its end", peak=format_bytes(peak))
    most = timeline.max_batch_size(budget, settings=settings) or _("none")
    lines = [
        _("batch size {size} does not fit: {verdict}.", size=estimate.batch_size, verdict=verdict),
        _("  budget: {budget}", budget=budget.explain()),
        _("  at the peak: {held}", held=held_at_peak(estimate)),
        _("  the peak is in: {place}", place=peak_place(estimate)),
        _("  the largest batch size that fits: {most}", most=most),
        _("  predicted with: {releases}", releases=timeline.releases),
    ]
    raise DoesNotFitError("\n".join(lines))
