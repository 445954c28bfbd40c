"""Variants: several sizes of one model side by side, and the largest of them that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vram_guard.errors import InvalidInputError
from vram_guard.plan.option import Option
from vram_guard.step import LARGEST_BATCH, TrainingStep, checked_count
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.plan.model import Plan
    from vram_guard.timeline import Estimate

#: Which of the variants that fit is chosen: the one with most parameters, or the last or first of those given.
Prefer = Literal["parameters", "last", "first"]
PREFERENCES: tuple[str, ...] = get_args(Prefer)

#: Batch sizes are tried up to here unless the caller says otherwise.
LARGEST_BATCH_ASKED = 2**20


@dataclass(frozen=True)
class Variant:
    """One variant: what it takes at the batch size that was asked for. Bytes are ints."""

    name: str
    parameters: int | None
    """Numbers in its parameters, shared ones once; None where it could not be built."""
    plan: Plan | None
    """How to run it: as written where that fits, else changed as far as was allowed; None where ``error`` says why."""
    largest_batch_size: int | None
    """The largest batch that fits as written; 0: not even one sample; None where ``error`` says why."""
    error: str = ""
    """What its constructor or its step raised, "" where nothing."""

    @property
    def estimate(self) -> Estimate | None:
        """The predicted step as written."""
        return None if self.plan is None else self.plan.before

    @property
    def peak(self) -> int | None:
        """Predicted reserved peak as written, in bytes."""
        return None if self.plan is None else self.plan.before.peak_reserved

    @property
    def fits(self) -> bool:
        """Whether it fits: as written, or under its plan."""
        return self.plan is not None and self.plan.fits

    @property
    def fits_as_written(self) -> bool:
        """Whether it fits without any change."""
        return self.plan is not None and self.plan.fits and not self.plan.changed

    def verdict(self) -> str:
        """What becomes of it, in a few words."""
        if self.plan is None:
            return self.error
        if self.fits_as_written:
            return "fits"
        if self.fits:
            made = self.plan
            words = Option(made.precision, made.splits, made.recipe).words(made.batch_size)
            return words.removeprefix(f"{made.precision_before}, ")
        missing = self.plan.peak - self.plan.budget.usable
        return f"short by {format_bytes(missing)}" if missing > 0 else "not known to fit: only a lower bound"


@dataclass(frozen=True)
class Variants:
    """All variants, in the order in which they were given."""

    rows: tuple[Variant, ...]
    batch_size: int
    budget: Budget
    prefer: Prefer

    @property
    def chosen(self) -> Variant | None:
        """The preferred one of those that fit; None where none does."""
        fitting = [row for row in self.rows if row.fits]
        if self.prefer == "last":
            fitting.reverse()
        if self.prefer == "parameters":
            # Of equally large ones, what fits as written; then the one given first (sorted is stable).
            fitting.sort(key=lambda row: (-(row.parameters or 0), not row.fits_as_written))
        return fitting[0] if fitting else None

    def __getitem__(self, name: str) -> Variant:
        """The variant with this name.

        Raises:
            InvalidInputError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise InvalidInputError(f"no variant is called {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def explain(self) -> str:
        """What was chosen and why, and what becomes of every other variant; several lines."""
        return "\n".join([self._verdict(), "", *(f"  - {row.name}: {self._line(row)}" for row in self.rows)])

    def _verdict(self) -> str:
        chosen = self.chosen
        if chosen is None:
            usable = format_bytes(self.budget.usable)
            return f"None of {len(self.rows)} variants fits into {usable} at batch size {self.batch_size}."
        how = "as written" if chosen.fits_as_written else "under its plan"
        assert chosen.plan is not None
        reason = {
            "parameters": "the one with most parameters that fits",
            "last": "the last of those given that fits",
            "first": "the first of those given that fits",
        }[self.prefer]
        peak, usable = format_bytes(chosen.plan.peak), format_bytes(chosen.plan.budget.usable)
        return f"{chosen.name}: {reason}, {peak} of {usable} {how} at batch size {self.batch_size}."

    @staticmethod
    def _line(row: Variant) -> str:
        if row.plan is None:
            return f"could not be traced: {row.error}"
        needs = f"{row.parameters:,} parameters, {format_bytes(row.plan.before.peak_reserved)} as written"
        return f"{needs}: {row.verdict()} (largest batch size as written: {row.largest_batch_size})"


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
    from vram_guard.budget import Budget
    from vram_guard.plan.techniques import checked_techniques

    named = _checked_steps(steps)
    checked_count("batch_size", batch_size)
    limit = min(checked_count("limit", limit), LARGEST_BATCH)
    techniques = sorted(checked_techniques(allow))
    if prefer not in PREFERENCES:
        raise InvalidInputError(f"prefer must be one of {', '.join(PREFERENCES)}, not {prefer!r}")
    resolved = Budget.resolve(budget=budget, gpu=gpu, margin=margin)

    def row(name: str, step: TrainingStep) -> Variant:
        say = _prefixed(name, progress)
        try:
            return _variant(name, step, batch_size, resolved, techniques, limit, settings, say)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            return Variant(name, None, None, None, error=f"{type(error).__name__}: {error}")

    return Variants(tuple(row(name, step) for name, step in named), batch_size, resolved, prefer)


def _variant(
    name: str,
    step: TrainingStep,
    batch_size: int,
    budget: Budget,
    allow: list[str],
    limit: int,
    settings: AllocatorSettings | None,
    progress: Callable[[str], None],
) -> Variant:
    from vram_guard.plan import ASSUMED_COMPUTE_CAPABILITY, plan
    from vram_guard.simulate.tracing.run import with_built_model

    progress("building the model")
    step = with_built_model(step, budget.compute_capability or ASSUMED_COMPUTE_CAPABILITY)
    made = plan(step, batch_size, budget, allow=allow, settings=settings, progress=progress)
    assert made.timeline_before is not None
    progress("looking for the largest batch")
    largest = made.timeline_before.max_batch_size(budget, settings=settings, limit=limit)
    return Variant(name, _parameters(step.model), made, largest)


def _parameters(model: Any) -> int:
    """How many numbers are in the parameters; ``parameters()`` names shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _checked_steps(steps: object) -> tuple[tuple[str, TrainingStep], ...]:
    """Names with their steps, in order.

    Raises:
        InvalidInputError: none, not a mapping or pairs, a name that is no text or empty or there twice, or something
            else than a step.
    """
    advice = "give {'lite': step.with_(model=Lite), 'full': step.with_(model=Full)}"
    pairs: list[Any] = list(steps.items() if isinstance(steps, Mapping) else _pairs(steps, advice))
    if not pairs:
        raise InvalidInputError(f"there are no variants to compare: {advice}")
    seen: set[str] = set()
    for name, step in pairs:
        if not isinstance(name, str) or not name.strip():
            raise InvalidInputError(f"a variant's name must be text, not {name!r}: {advice}")
        if name in seen:
            raise InvalidInputError(f"two variants are called {name!r}: every variant needs a name of its own")
        if not isinstance(step, TrainingStep):
            raise InvalidInputError(f"variant {name!r} must be a TrainingStep, not {type(step).__name__}: {advice}")
        seen.add(name)
    return tuple(pairs)


def _pairs(steps: object, advice: str) -> list[tuple[Any, Any]]:
    try:
        found = [tuple(pair) for pair in steps]  # type: ignore[attr-defined]
    except TypeError:
        raise InvalidInputError(
            f"variants are a mapping of names to steps, not {type(steps).__name__}: {advice}"
        ) from None
    if any(len(pair) != 2 for pair in found):
        raise InvalidInputError(f"variants are pairs of a name and a step: {advice}")
    return found


def _prefixed(name: str, progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """Progress lines that begin with the variant's name."""
    if progress is None:
        return lambda _line: None
    return lambda line: progress(f"{name}: {line}")
