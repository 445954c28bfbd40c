"""Variants: several sizes of one model side by side, and the largest of them that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import GPU, Budget
from vram_guard.checks import checked_count
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_BATCH_ASKED
from vram_guard.plan.comparison import Compared, Comparison, Configuration, compared_rows
from vram_guard.step import TrainingStep
from vram_guard.units import format_bytes


@dataclass(frozen=True)
class Variants(Comparison):
    """Variants of a model, of which one is chosen."""

    batch_size: int

    @property
    def chosen(self) -> Compared | None:
        """The one with most parameters of those that fit; None where none does."""
        # Of equally large ones, what fits as written; then the one given first.
        fitting = [row for row in self.rows if row.fits]
        return max(fitting, key=lambda row: (row.parameters or 0, row.fits_as_written), default=None)

    def explain(self) -> str:
        """The choice with its reason, and the verdict on every other variant; several lines."""
        return "\n".join([self.choice(), "", *(f"  - {row.name}: {_line(row)}" for row in self.rows)])

    def choice(self) -> str:
        """The choice with its reason, in one line."""
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
            reason=_("the one with most parameters that fits"),
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


def variants(
    steps: Mapping[str, TrainingStep] | Iterable[tuple[str, TrainingStep]],
    batch_size: int,
    budget: Budget | str | int | None = None,
    *,
    gpu: GPU | str | None = None,
    margin: float | None = None,
    allow: Iterable[str] = (),
    limit: int = LARGEST_BATCH_ASKED,
    settings: AllocatorSettings | None = None,
    cudnn: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Variants:
    """Predict the memory of each variant of a model at one batch size, and choose the largest that fits.

    Variants that share everything but the model are made from one step::

        steps = {name: step.with_(model=build) for name, build in constructors.items()}

    Args:
        steps: name -> the step with that variant (its ``model`` best a constructor: built symbolically, it takes no
            memory).
        batch_size: samples that the loader delivers at once.
        budget: as in :func:`vram_guard.plan.comparison.compare`; so are ``gpu``, ``margin``, ``settings`` and
            ``cudnn``.
        gpu: see there.
        margin: see there.
        allow: what a plan may change in a variant that does not fit as written, as in :func:`vram_guard.plan`;
            nothing by default: a smaller variant is what is chosen instead.
        limit: the largest batch size that is considered, in samples.
        settings: see there.
        cudnn: see there.
        progress: called with a line of text before each variant and each slow part of it.

    Returns:
        A row for every variant. One that cannot be built or traced has the reason in its row.

    Raises:
        InvalidInputError: no variants, a name twice, or another argument that makes no sense; before any work.
        NoDeviceError: no budget, no GPU name and no GPU here.

    Example:
        >>> def step(width):
        ...     net = torch.nn.Linear(width, 8)
        ...     return TrainingStep(net, torch.ones(4, width), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> variants({"wide": step(1024), "narrow": step(256)}, 30000, "64MiB").chosen.name
        'narrow'
    """
    given = [Configuration(name, step, batch_size) for name, step in _named_steps(steps)]
    limit = checked_count("limit", limit)
    rows, resolved = compared_rows(given, budget, gpu, margin, allow, settings, progress, cudnn=cudnn, limit=limit)
    return Variants(rows, resolved, batch_size)


def _named_steps(steps: object) -> list[tuple[str, TrainingStep]]:
    """Names with their steps, in order.

    Raises:
        InvalidInputError: not a mapping or pairs, none, a name that is not a text or empty, or something else than a
            step.
    """
    try:
        pairs = [tuple(pair) for pair in (steps.items() if isinstance(steps, Mapping) else steps)]  # type: ignore[attr-defined]
    except TypeError:
        pairs = []
    wrong = [pair for pair in pairs if len(pair) != 2 or not _is_named(*pair)]
    if wrong or not pairs:
        raise InvalidInputError(
            _(
                "variants are names and training steps, such as {example}, not {value}",
                example="{'lite': step.with_(model=Lite), 'full': step.with_(model=Full)}",
                value=repr(wrong[0] if wrong else steps)[:60],
            )
        )
    return pairs


def _is_named(name: object, step: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and isinstance(step, TrainingStep)
