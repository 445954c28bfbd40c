"""Comparison: configurations of a training, or variants of its model, side by side without running any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vram_guard.checks import checked_count, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.techniques import DEFAULT_ALLOW, checked_techniques
from vram_guard.step import TrainingStep
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.plan.model import Plan
    from vram_guard.timeline import Estimate

#: Which of the variants that fit is chosen: the one with most parameters, or the last or first of those given.
Prefer = Literal["parameters", "last", "first"]
PREFERENCES: tuple[str, ...] = get_args(Prefer)

#: Batch sizes are tried up to here unless the caller says otherwise.
LARGEST_BATCH_ASKED = 2**20

_CHOSEN = {
    "parameters": marked("the one with most parameters that fits"),
    "last": marked("the last of those given that fits"),
    "first": marked("the first of those given that fits"),
}


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
    """What one configuration comes to. Bytes are ints."""

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
    """What the model's constructor or the step raised, "" where nothing."""

    @property
    def precision(self) -> str:
        """The configuration's own."""
        return self.step.precision

    @property
    def accumulate(self) -> int:
        """The configuration's own micro-batches per optimizer step."""
        return self.step.accumulate

    @property
    def estimate(self) -> Estimate | None:
        """The predicted step as written."""
        return None if self.plan is None else self.plan.before

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
        """Whether it fits: as written, or under its plan."""
        return self.plan is not None and self.plan.fits

    @property
    def fits_as_written(self) -> bool:
        """Whether it fits without any change."""
        return self.plan is not None and self.plan.fits_as_written

    @property
    def samples_per_second(self) -> float | None:
        """By the cost model, under the plan; None: not modelled."""
        return self.batch_size * self.accumulate / self.seconds if self.seconds else None

    def verdict(self) -> str:
        """What becomes of it, in a few words."""
        return self.error if self.plan is None else self.plan.verdict()


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

    def __getitem__(self, name: str) -> Compared:
        """The row with this name.

        Raises:
            InvalidInputError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows)
        raise InvalidInputError(_("nothing is called {name}; there are {known}", name=repr(name), known=known))


@dataclass(frozen=True)
class Variants(Comparison):
    """Variants of a model, of which one is chosen."""

    batch_size: int
    prefer: Prefer

    @property
    def chosen(self) -> Compared | None:
        """The preferred one of those that fit; None where none does."""
        fitting = [row for row in self.rows if row.fits]
        if self.prefer == "last":
            fitting.reverse()
        if self.prefer == "parameters":
            # Of equally large ones, what fits as written; then the one given first (sorted is stable).
            fitting.sort(key=lambda row: (-(row.parameters or 0), not row.fits_as_written))
        return fitting[0] if fitting else None

    def explain(self) -> str:
        """What was chosen and why, and what becomes of every other variant; several lines."""
        return "\n".join([self.choice(), "", *(f"  - {row.name}: {_line(row)}" for row in self.rows)])

    def choice(self) -> str:
        """What was chosen and why, in one line."""
        chosen, size = self.chosen, self.batch_size
        if chosen is None or chosen.plan is None:
            return _(
                "None of {count} variants fits into {usable} at batch size {size}.",
                count=len(self.rows),
                usable=format_bytes(self.budget.usable),
                size=size,
            )
        how = _("as written") if chosen.fits_as_written else _("under its plan")
        peak, usable = format_bytes(chosen.plan.peak), format_bytes(chosen.plan.budget.usable)
        return _(
            "{name}: {reason}, {peak} of {usable} {how} at batch size {size}.",
            name=chosen.name,
            reason=_(_CHOSEN[self.prefer]),
            peak=peak,
            usable=usable,
            how=how,
            size=size,
        )


def _line(row: Compared) -> str:
    if row.plan is None:
        return _("could not be traced: {error}", error=row.error)
    return _(
        "{count} parameters, {peak} as written: {verdict} (largest batch size as written: {largest})",
        count=f"{row.parameters:,}",
        peak=format_bytes(row.plan.before.peak_reserved),
        verdict=row.verdict(),
        largest=row.largest_batch_size,
    )


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
    given = tuple(configurations)
    learning_rate_factor(lr_rule, 1, 1)
    rows, resolved = _rows(given, budget, gpu, margin, allow, settings, progress, lr_rule=lr_rule)
    return Comparison(rows, resolved)


def variants(
    steps: Mapping[str, TrainingStep] | Iterable[tuple[str, TrainingStep]],
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    prefer: Prefer = "parameters",
    limit: int = LARGEST_BATCH_ASKED,
    settings: AllocatorSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> Variants:
    """What each variant of a model takes at one batch size, and the largest that fits.

    Variants that share everything but the model are made from one step::

        steps = {name: step.with_(model=build) for name, build in constructors.items()}

    Args:
        steps: name -> the step with that variant (its ``model`` best a constructor: built symbolically, it takes no
            memory), from small to large or by preference where ``prefer`` goes by their order.
        batch_size: samples that the loader delivers at once.
        budget: what the allocator may reserve: a Budget, "24GiB", bytes, or a GPU's name.
        gpu: a whole card by name; with neither, the device at hand.
        margin: the share of the budget to leave free; None: the default.
        allow: what a plan may change in a variant that does not fit as written, as in :func:`vram_guard.plan`;
            nothing by default: a smaller variant is what is chosen instead.
        prefer: which of the variants that fit is chosen, see :data:`Prefer`.
        limit: the largest batch size that is considered, in samples.
        settings: the allocator's settings; None: PyTorch's defaults.
        progress: called with a line of text before each variant and each slow part of it.

    Returns:
        A row for every variant. One that cannot be built or traced has the reason in its row.

    Raises:
        InvalidInputError: no variants, a name twice, or another argument that makes no sense; before any work.
        NoDeviceError: no budget, no GPU name and no GPU here.
    """
    given = [Configuration(name, step, batch_size) for name, step in _named_steps(steps)]
    limit = checked_count("limit", limit)
    one_of("prefer", prefer, PREFERENCES)
    rows, resolved = _rows(given, budget, gpu, margin, allow, settings, progress, limit=limit)
    return Variants(rows, resolved, batch_size, prefer)


def _rows(
    given: Sequence[Configuration],
    budget: Budget | str | int | None,
    gpu: GPU | str | None,
    margin: float | None,
    allow: Iterable[str],
    settings: AllocatorSettings | None,
    progress: Callable[[str], None] | None,
    *,
    lr_rule: str = "none",
    limit: int | None = None,
) -> tuple[tuple[Compared, ...], Budget]:
    """A row for each; the largest batch of each, up to ``limit``, where one is given."""
    from vram_guard.budget import Budget

    if not given:
        raise InvalidInputError(_("there is nothing to compare: give at least one"))
    names = [one.name for one in given]
    for one in given:
        if names.count(one.name) > 1:
            raise InvalidInputError(
                _("two configurations are called {name}: every one needs a name of its own", name=repr(one.name))
            )
        checked_count("batch_size", one.batch_size)
    techniques = sorted(checked_techniques(allow))
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)

    def row(one: Configuration) -> Compared:
        def say(line: str) -> None:
            if progress is not None:
                progress(f"{one.name}: {line}")

        found: dict[str, Any]
        try:
            found = _found(one, resolved, techniques, settings, limit, say)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            found = {"error": f"{type(error).__name__}: {error}"}
        suggested = _suggested(given[0], one, lr_rule)
        return Compared(one.name, one.step, one.batch_size, one.learning_rate, suggested, **found)

    return tuple(map(row, given)), resolved


def _found(
    one: Configuration,
    budget: Budget,
    allow: list[str],
    settings: AllocatorSettings | None,
    limit: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Fields of a row that have to be worked for."""
    from vram_guard.plan import ASSUMED_COMPUTE_CAPABILITY, plan
    from vram_guard.simulate.tracing.run import with_built_model

    say(_("building the model"))
    step = with_built_model(one.step, budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY)
    made = plan(step, one.batch_size, budget, allow=allow, settings=settings, progress=say)
    found = {"plan": made, "seconds": _seconds(made), "parameters": _parameters(step.model)}
    if limit is not None and made.timeline_before is not None:
        say(_("looking for the largest batch"))
        found["largest_batch_size"] = made.timeline_before.max_batch_size(budget, settings=settings, limit=limit)
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
    """How many numbers are in the parameters; ``parameters()`` names shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _suggested(first: Configuration, one: Configuration, rule: str) -> float | None:
    if first.learning_rate is None:
        return None
    before, after = (each.batch_size * each.step.accumulate for each in (first, one))
    return first.learning_rate * learning_rate_factor(rule, before, after)


def _named_steps(steps: object) -> list[tuple[str, TrainingStep]]:
    """Names with their steps, in order.

    Raises:
        InvalidInputError: not a mapping or pairs, a name that is no text or empty, or something else than a step.
    """
    advice = _("give {example}", example="{'lite': step.with_(model=Lite), 'full': step.with_(model=Full)}")
    try:
        pairs = [tuple(pair) for pair in (steps.items() if isinstance(steps, Mapping) else steps)]  # type: ignore[attr-defined]
    except TypeError:
        kind = type(steps).__name__
        raise InvalidInputError(
            _("variants are a mapping of names to steps, not {kind}: {advice}", kind=kind, advice=advice)
        ) from None
    for pair in pairs:
        if len(pair) != 2:
            raise InvalidInputError(_("variants are pairs of a name and a step: {advice}", advice=advice))
        name, step = repr(pair[0]), pair[1]
        if not isinstance(pair[0], str) or not pair[0].strip():
            raise InvalidInputError(_("a variant's name must be text, not {name}: {advice}", name=name, advice=advice))
        if not isinstance(step, TrainingStep):
            kind = type(step).__name__
            raise InvalidInputError(
                _("variant {name} must be a TrainingStep, not {kind}: {advice}", name=name, kind=kind, advice=advice)
            )
    if not pairs:
        raise InvalidInputError(_("there are no variants to compare: {advice}", advice=advice))
    return pairs
