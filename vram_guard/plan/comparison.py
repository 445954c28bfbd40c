"""Comparison: several configurations of a training side by side, without running any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.techniques import DEFAULT_ALLOW
from vram_guard.step import TrainingStep, checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.plan.model import Plan


@dataclass(frozen=True)
class Configuration:
    """One way to train."""

    name: str
    step: TrainingStep
    batch_size: int
    """Samples that the loader delivers at once, on one process."""
    learning_rate: float | None = None
    """As the configuration has it; None: it does not say."""


@dataclass(frozen=True)
class Compared:
    """What one configuration comes to. Bytes are ints."""

    name: str
    batch_size: int
    precision: str
    accumulate: int
    learning_rate: float | None
    suggested_learning_rate: float | None
    """The first configuration's, scaled by the rule to this one's samples per optimizer step; None: not known."""
    plan: Plan | None
    """As written where that fits, else changed as far as was allowed; None where ``error`` says why."""
    seconds: float | None
    """Of one optimizer step under the plan, by the cost model; None: not modelled."""
    samples_per_second: float | None
    error: str = ""

    @property
    def peak(self) -> int | None:
        """Predicted reserved peak as written."""
        return None if self.plan is None else self.plan.before.peak_reserved

    @property
    def utilization(self) -> float | None:
        """The peak as written over the whole memory of the GPU (or the whole budget)."""
        return None if self.plan is None else self.plan.before.peak_reserved / self.plan.budget.total

    @property
    def fits(self) -> bool:
        """Whether it fits: as written, or under its plan."""
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True)
class Comparison:
    """All configurations, in the order in which they were given; the first is what the others are compared with."""

    rows: tuple[Compared, ...]
    budget: Budget

    def relative_speed(self, row: Compared) -> float | None:
        """Samples a second over those of the first row that has a time."""
        first = next((one.samples_per_second for one in self.rows if one.samples_per_second), None)
        return None if first is None or row.samples_per_second is None else row.samples_per_second / first

    @property
    def all_fit(self) -> bool:
        """Whether every one fits, as written or under its plan."""
        return all(row.fits for row in self.rows)


def compare(
    configurations: Iterable[Configuration],
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = DEFAULT_ALLOW,
    lr_rule: str = "linear",
    settings: AllocatorSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Predicted peak, plan, learning rate and modelled speed of several configurations.

    Args:
        configurations: what to compare.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name; with neither, the device at hand.
        margin: the share of the budget to leave free; None: the default.
        allow: what a plan may change where a configuration does not fit as written.
        lr_rule: "linear", "sqrt" or "none": how learning rates follow the samples of an optimizer step.
        settings: the allocator's settings; None: PyTorch's defaults.
        progress: called with a line of text before each slow part.

    Returns:
        A row for each; one that cannot be built or traced has the reason in its row.

    Raises:
        InvalidInputError: no configurations, a name twice, or an argument that makes no sense; before any work.
        NoDeviceError: no budget, no GPU name and no GPU here.
    """
    from vram_guard.budget import Budget
    from vram_guard.plan.techniques import checked_techniques

    given = tuple(configurations)
    if not given:
        raise InvalidInputError("there is nothing to compare: give at least one configuration")
    names = [one.name for one in given]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise InvalidInputError(f"two configurations are called {doubled!r}: every one needs a name of its own")
    for one in given:
        checked_count("batch_size", one.batch_size)
    techniques = sorted(checked_techniques(allow))
    learning_rate_factor(lr_rule, 1, 1)
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)

    def row(one: Configuration) -> Compared:
        suggested = _suggested(given[0], one, lr_rule)
        if progress is not None:
            progress(one.name)
        try:
            return _compared(one, resolved, techniques, suggested, settings)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            said = f"{type(error).__name__}: {error}"
            return _row(one, None, suggested, error=said)

    return Comparison(tuple(row(one) for one in given), resolved)


def _compared(
    one: Configuration,
    budget: Budget,
    allow: list[str],
    suggested: float | None,
    settings: AllocatorSettings | None,
) -> Compared:
    from vram_guard.plan import plan

    made = plan(one.step, one.batch_size, budget, allow=allow, settings=settings)
    return _row(one, made, suggested, seconds=_seconds(one, made))


def _seconds(one: Configuration, made: Plan) -> float | None:
    """One optimizer step under the plan; the step as written where nothing fits."""
    from vram_guard.plan.step_time import step_seconds

    assert made.timeline_before is not None
    try:
        written = step_seconds(
            made.timeline_before, one.batch_size, made.budget.gpu, micro_batches=one.step.accumulate
        ).seconds
    except InvalidInputError:
        return None
    factor = made.slowdown if made.fits and made.changed else 1.0
    return None if factor is None else written * factor


def _row(
    one: Configuration, made: Plan | None, suggested: float | None, *, seconds: float | None = None, error: str = ""
) -> Compared:
    samples = one.batch_size * one.step.accumulate
    return Compared(
        name=one.name,
        batch_size=one.batch_size,
        precision=one.step.precision,
        accumulate=one.step.accumulate,
        learning_rate=one.learning_rate,
        suggested_learning_rate=suggested,
        plan=made,
        seconds=seconds,
        samples_per_second=samples / seconds if seconds else None,
        error=error,
    )


def _suggested(first: Configuration, one: Configuration, rule: str) -> float | None:
    if first.learning_rate is None:
        return None
    before, after = (each.batch_size * each.step.accumulate for each in (first, one))
    return first.learning_rate * learning_rate_factor(rule, before, after)
