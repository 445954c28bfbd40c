"""The search: the least change that makes a step fit (pure over timelines).

Options stand in one fixed order of preference, and the first that fits is taken:

1. the step as written;
2. mixed precision alone: the same batch in one pass, and faster on tensor cores;
3. gradient accumulation, fewest micro-batches first (the largest micro-batch keeps the GPU busiest); at the
   same number of micro-batches mixed precision comes first, for it runs faster and leaves more free.

So mixed precision is never paid for with more micro-batches than the precision as written would need. Neither
the order nor an option's peak depends on the budget, and every option that is tried is replayed: so a bigger
budget or one more allowed technique never leads to a later option, whatever fragmentation does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.plan.growth import grown
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.options import (
    Candidate,
    Option,
    Request,
    Source,
    fits_reasons,
    make_plan,
    tier_reason,
    unchanged,
)
from vram_guard.plan.techniques import uses_batch_norm
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.timeline import Estimate


@dataclass
class _Trial:
    """Tries options one by one and remembers what was wrong with each."""

    request: Request
    source: Source
    rejected: list[Rejected] = field(default_factory=list)
    untraceable: set[tuple[str, bool]] = field(default_factory=set)
    """(precision, whether split): the step failed there, and would fail again."""

    def candidate(self, option: Option) -> Candidate:
        timeline = self.source(option.precision, option.splits)
        size = self.request.batch_size // option.splits
        return Candidate(timeline, timeline.at(size, settings=self.request.settings))

    def fitting(self, option: Option) -> Candidate | None:
        """The option's prediction if it fits; otherwise it is rejected."""
        words = option.words(self.request.batch_size)
        if (option.precision, option.splits > 1) in self.untraceable:
            return None
        try:
            candidate = self.candidate(option)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            self.untraceable.add((option.precision, option.splits > 1))
            why = f"the step fails there: {type(error).__name__}: {error}"
            self.rejected.append(Rejected(words, None, 0, why))
            return None
        return candidate if self.accepts(words, candidate.estimate) else None

    def accepts(self, words: str, estimate: Estimate) -> bool:
        peak, usable = estimate.peak_reserved, self.request.budget.usable
        missing = max(0, peak - usable)
        if missing:
            why = f"needs {format_bytes(peak)}, misses by {format_bytes(missing)}"
        elif estimate.tier == "formula":
            why = f"needs at least {format_bytes(peak)}, a lower bound that promises nothing"
        else:
            return True
        self.rejected.append(Rejected(words, peak, missing, why))
        return False


def search(request: Request, source: Source) -> Plan:
    """The plan for a request.

    Errors of the step as written reach the caller; where it fails under another option, that is rejected.
    """
    trial = _Trial(request, source)
    as_written = Option(request.precision, 1)
    before = trial.candidate(as_written)
    if trial.accepts(as_written.words(request.batch_size), before.estimate):
        return grown(request, before) if request.grow else unchanged(request, before, fits_reasons(before))
    for option in request.options():
        if option != as_written and (after := trial.fitting(option)) is not None:
            return _shrunk(request, option, before, after, trial.rejected)
    return _nothing_fits(request, before, trial.rejected)


def _shrunk(request: Request, option: Option, before: Candidate, after: Candidate, rejected: list[Rejected]) -> Plan:
    reasons = [_shortage(before.estimate, request)]
    if option.precision != request.precision:
        reasons.append(request.mixed_why)
    if option.splits > 1:
        reasons.append(
            f"{option.splits} equal micro-batches are the fewest that fit; the effective batch size stays, "
            "and with it learning rates, schedules and the number of optimizer steps."
        )
        if uses_batch_norm(after.timeline):
            reasons.append(
                "Batch normalisation takes its statistics over a micro-batch "
                f"({request.batch_size // option.splits} samples instead of {request.batch_size}): the "
                "result is close to the unsplit one, not equal."
            )
    reasons += tier_reason(after.estimate)
    return make_plan(request, before, after, option, request.batch_size, True, tuple(reasons), tuple(rejected))


def _shortage(estimate: Estimate, request: Request) -> str:
    peak, usable = estimate.peak_reserved, request.budget.usable
    if peak <= usable:
        return "The step as written could only be bounded from below, so it is not known to fit."
    return (
        f"As written the step needs {format_bytes(peak)}, {format_bytes(peak - usable)} more than the "
        f"{format_bytes(usable)} that may be used."
    )


def _nothing_fits(request: Request, before: Candidate, rejected: list[Rejected]) -> Plan:
    missed = [option for option in rejected if option.missing > 0]
    nearest = min(missed, key=lambda option: option.missing, default=None)
    reasons = [_shortage(before.estimate, request)]
    if nearest is not None and len(rejected) > 1:
        reasons.append(
            f"Nothing that is allowed makes it fit. Nearest: {nearest.option}, short by "
            f"{format_bytes(nearest.missing)} ({nearest.missing} bytes)."
        )
    if request.mixed is None and request.mixed_why:
        reasons.append(request.mixed_why)
    if not request.may_accumulate:
        reasons.append("Gradient accumulation was not allowed, or there are no gradients to accumulate.")
    elif request.batch_size == 1:
        reasons.append("A batch of one sample cannot be split.")
    reasons.append("Nothing was changed.")
    option = Option(request.precision, 1)
    return make_plan(request, before, before, option, request.batch_size, False, tuple(reasons), tuple(rejected))
