"""Comparison: configurations of a training, or variants of a model, side by side, without running any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vram_guard.budget import GPU, Budget
from vram_guard.checks import checked_count
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_BATCH_ASKED
from vram_guard.plan.checks import check_cudnn
from vram_guard.plan.learning_rate import learning_rate_factor, rule_for
from vram_guard.plan.model import Plan
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques
from vram_guard.releases import Releases
from vram_guard.step import TrainingStep
from vram_guard.units import format_bytes
from vram_guard.user_code import line_of_error, with_line


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
class Compared(Configuration):
    """The result of one configuration. Bytes are ints."""

    suggested_learning_rate: float | None = None
    """The first configuration's, scaled by the rule to this one's samples per optimizer step; None: not known."""
    plan: Plan | None = None
    """As written where that fits, else changed as far as was allowed; None where ``error`` says why."""
    seconds: float | None = None
    """Of one optimizer step under the plan, by the cost model; None: not modelled."""
    parameters: int | None = None
    """Numbers in the model's parameters, shared ones once; None where it could not be built."""
    largest_batch_size: int | None = None
    """The largest batch that fits as written; 0: not even one sample; None where that was not asked, or failed."""
    error: str = ""
    """The error of the model's constructor or of the step, "" where there was none."""

    @property
    def peak(self) -> int | None:
        """Predicted reserved peak as written, in bytes."""
        return None if self.plan is None else self.plan.before.peak_reserved

    @property
    def utilization(self) -> float | None:
        """The peak as written over the whole memory of the GPU (or the whole budget)."""
        return None if self.plan is None else self.plan.before.peak_reserved / self.plan.budget.total

    @property
    def fits(self) -> bool:
        """True if it fits: as written, or under its plan."""
        return self.plan is not None and self.plan.fits

    @property
    def fits_as_written(self) -> bool:
        """True if it fits without any change."""
        return self.plan is not None and self.plan.fits_as_written

    @property
    def samples_per_second(self) -> float | None:
        """By the cost model, under the plan; None: not modelled."""
        return self.batch_size * self.step.accumulate / self.seconds if self.seconds else None

    def verdict(self) -> str:
        """The verdict in a few words."""
        return self.error if self.plan is None else self.plan.verdict()


@dataclass(frozen=True)
class Comparison:
    """All configurations, in the order in which they were given; the first is what the others are compared with."""

    rows: tuple[Compared, ...]
    budget: Budget
    rates_by_rule: bool = field(default=False, kw_only=True)
    """The rows' learning rates are those that the rule gives for their batches, not what the configurations say."""
    of_variants: bool = field(default=False, kw_only=True)
    """The rows are sizes of one model, of which one is chosen."""

    def relative_speed(self, row: Compared) -> float | None:
        """Samples a second over those of the first row that has a time."""
        first = next((one.samples_per_second for one in self.rows if one.samples_per_second), None)
        return None if first is None or row.samples_per_second is None else row.samples_per_second / first

    @property
    def compared_budget(self) -> Budget:
        """The budget that all rows are held against, where it is one; else the one that was given."""
        return self.row_budgets[0] if len(self.row_budgets) == 1 else self.budget

    @property
    def row_budgets(self) -> tuple[Budget, ...]:
        """The budgets that rows are held against, the smallest first: margins differ, and what NCCL takes of a card."""
        found = (row.plan.budget for row in self.rows if row.plan is not None)
        return tuple({one.usable: one for one in sorted(found, key=lambda one: one.usable)}.values())

    @property
    def releases(self) -> Releases | None:
        """The releases that the predictions are for; None where there is none."""
        return next((row.plan.before.releases for row in self.rows if row.plan is not None), None)

    @property
    def all_fit(self) -> bool:
        """True if every one fits, as written or under its plan."""
        return all(row.fits for row in self.rows)

    @property
    def chosen(self) -> Compared | None:
        """The one with most parameters of those that fit; None where none does."""
        # Of equally large ones, what fits as written; then the one given first.
        fitting = [row for row in self.rows if row.fits]
        return max(fitting, key=lambda row: (row.parameters or 0, row.fits_as_written), default=None)

    def choice(self) -> str:
        """The choice among variants with its reason, in one line."""
        chosen, size = self.chosen, self.rows[0].batch_size
        if chosen is None or chosen.plan is None:
            return _(
                "None of {count} variants fits into {usable} at batch size {size}.",
                count=len(self.rows),
                usable=format_bytes(self.budget.usable),
                size=size,
            )
        return _(
            "{name}: the one with most parameters that fits, {peak} of {usable} {how} at batch size {size}.",
            name=chosen.name,
            peak=format_bytes(chosen.plan.peak),
            usable=format_bytes(chosen.plan.budget.usable),
            how=_("as written") if chosen.fits_as_written else _("under its plan"),
            size=size,
        )


def compare(
    configurations: Iterable[Configuration],
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = DEFAULT_ALLOW,
    lr_rule: str = "linear",
    cudnn: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Predicted peak, plan, learning rate and modelled speed of several configurations.

    Args:
        configurations: what to compare.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name; with neither, this machine's device.
        margin: the share of the budget to leave free; None: the default.
        allow: what a plan may change where a configuration does not fit as written.
        lr_rule: "linear", "sqrt", "none" or "auto": how learning rates follow the samples of an optimizer step.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.plan`.
        progress: called with a line of text before each slow part.

    Returns:
        A row for each; one that cannot be built or traced has the reason in its row.

    Raises:
        InvalidInputError: no configurations, a name twice, or an argument that makes no sense; before any work.
        NoDeviceError: no budget, no GPU name and no GPU here.
    """
    given = tuple(configurations)
    learning_rate_factor(lr_rule, 1, 1)
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    rows = _compared(given, resolved, allow, cudnn, progress or (lambda _line: None))
    rated = (replace(row, suggested_learning_rate=_suggested(given[0], row, lr_rule)) for row in rows)
    return Comparison(tuple(rated), resolved)


def variants(
    steps: Mapping[str, TrainingStep],
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    cudnn: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Predict the memory of each variant of a model at one batch size, and choose the largest that fits.

    Variants that share everything but the model are made from one step::

        steps = {name: step.with_(model=build) for name, build in constructors.items()}

    Args:
        steps: name -> the step with that variant (its ``model`` best a constructor: built symbolically, it takes no
            memory).
        batch_size: samples that the loader delivers at once.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name; with neither, this machine's device.
        margin: the share of the budget to leave free; None: the default.
        allow: what a plan may change in a variant that does not fit as written, as in :func:`vram_guard.plan`;
            nothing by default: a smaller variant is what is chosen instead.
        cudnn: the cuDNN that is asked for the workspaces of convolutions, as in :func:`vram_guard.plan`.
        progress: called with a line of text before each variant and each slow part of it.

    Returns:
        A row for every variant. One that cannot be built or traced has the reason in its row.

    Raises:
        InvalidInputError: no variants, or another argument that makes no sense; before any work.
        NoDeviceError: no budget, no GPU name and no GPU here.

    Example:
        >>> def step(width):
        ...     net = torch.nn.Linear(width, 8)
        ...     return TrainingStep(net, torch.ones(4, width), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> variants({"wide": step(1024), "narrow": step(256)}, 30000, "64MiB").chosen.name
        'narrow'
    """
    given = [Configuration(name, step, batch_size) for name, step in _named_steps(steps)]
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)
    rows = _compared(given, resolved, allow, cudnn, progress or (lambda _line: None), looks_for_largest=True)
    return Comparison(tuple(rows), resolved, of_variants=True)


def _named_steps(steps: object) -> list[tuple[str, TrainingStep]]:
    if isinstance(steps, Mapping) and all(isinstance(step, TrainingStep) for step in steps.values()):
        return [(str(name), step) for name, step in steps.items()]
    raise InvalidInputError(
        _(
            "variants are names and training steps, such as {example}, not {value}",
            example="{'lite': step.with_(model=Lite), 'full': step.with_(model=Full)}",
            value=repr(steps)[:60],
        )
    )


def _compared(
    given: Sequence[Configuration],
    budget: Budget,
    allow: Iterable[str],
    cudnn: str | None,
    progress: Callable[[str], None],
    *,
    looks_for_largest: bool = False,
) -> Iterator[Compared]:
    """A row for each configuration, once all of them are known to make sense."""
    if not given:
        raise InvalidInputError(_("there is nothing to compare: give at least one"))
    names = [one.name for one in given]
    for one in given:
        if names.count(one.name) > 1:
            raise InvalidInputError(
                _("two configurations are named {name}: each needs a unique name", name=repr(one.name))
            )
        checked_count("batch_size", one.batch_size)
    check_cudnn(cudnn)
    techniques = sorted(checked_techniques(allow))
    for one in given:
        own = Compared(one.name, one.step, one.batch_size, one.learning_rate)

        def say(line: str, name: str = one.name) -> None:
            progress(f"{name}: {line}")

        try:
            found = _found(one, budget, techniques, cudnn, say, looks_for_largest=looks_for_largest)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            found = {"error": with_line(f"{type(error).__name__}: {error}", line_of_error(error))}
        yield replace(own, **found)


def _found(
    one: Configuration,
    budget: Budget,
    allow: list[str],
    cudnn: str | None,
    say: Callable[[str], None],
    *,
    looks_for_largest: bool,
) -> dict[str, Any]:
    """Fields of a row that have to be worked for."""
    from vram_guard.plan import PlanOptions, plan
    from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY
    from vram_guard.simulate import trace
    from vram_guard.simulate.tracing.run import with_built_model

    say(_("building the model"))
    step = with_built_model(one.step, budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY)
    made = plan(step, one.batch_size, budget, allow=allow, options=PlanOptions(cudnn=cudnn), progress=say)
    found = {"plan": made, "seconds": _seconds(made), "parameters": _parameters(step.model)}
    if looks_for_largest and made.timeline_before is not None:
        say(_("looking for the largest batch"))
        timeline = made.timeline_before
        if step.job is not None:  # followed at the one size; the law spares a trace for each size that is tried
            timeline = trace(step, budget=budget, cudnn=cudnn)
        found["largest_batch_size"] = timeline.max_batch_size(budget, limit=LARGEST_BATCH_ASKED)
    return found


def _seconds(made: Plan) -> float | None:
    """One optimizer step under the plan; the step as written where nothing fits."""
    from vram_guard.plan.step_time import seconds_as_written

    try:
        written = seconds_as_written(made)
    except InvalidInputError:  # the timeline says nothing of the step's work
        return None
    factor = made.slowdown if made.fits and made.changed else 1.0
    return None if factor is None else written * factor


def _parameters(model: Any) -> int:
    """Number of elements of all parameters; ``parameters()`` yields shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _suggested(first: Configuration, row: Compared, lr_rule: str) -> float | None:
    if first.learning_rate is None:
        return None
    made = row.plan
    optimizer = made.timeline_before.optimizer if made is not None and made.timeline_before is not None else ""
    before, after = (each.batch_size * each.step.accumulate for each in (first, row))
    return first.learning_rate * learning_rate_factor(rule_for(lr_rule, optimizer), before, after)
