"""Options, the request that a search answers, and how an answer becomes a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.techniques import splits_of

if TYPE_CHECKING:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.timeline import Estimate, Timeline

#: (precision, micro-batches that a loaded batch is split into) -> timeline over the micro-batch size.
Source = Callable[[str, int], "Timeline"]


class Option(NamedTuple):
    """One way to run a loaded batch."""

    precision: str
    splits: int

    def words(self, batch_size: int) -> str:
        """The option as people read it."""
        if self.splits == 1:
            return f"{self.precision}, batch {batch_size}"
        return f"{self.precision}, {self.splits} micro-batches of {batch_size // self.splits}"


@dataclass(frozen=True)
class Request:
    """What is asked of the search; sizes in samples, amounts in bytes."""

    batch_size: int
    precision: str
    budget: Budget
    mixed: str | None = None
    """The mixed precision that may replace ``precision``."""
    mixed_why: str = ""
    may_accumulate: bool = False
    accumulate: int = 1
    ranks: int = 1
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    dataset_size: int | None = None
    settings: AllocatorSettings | None = None

    @property
    def samples_per_batch(self) -> int:
        """Samples of an optimizer step for each sample of a loaded batch."""
        return self.accumulate * self.ranks

    def options(self) -> Iterator[Option]:
        """Every option that is allowed, in order of preference."""
        precisions = [self.mixed, self.precision] if self.mixed else [self.precision]
        yield Option(self.precision, 1)
        if self.mixed:
            yield Option(self.mixed, 1)
        if self.may_accumulate:
            for splits in splits_of(self.batch_size):
                yield from (Option(precision, splits) for precision in precisions)


class Candidate(NamedTuple):
    """An option, or a grown batch, with its prediction."""

    timeline: Timeline
    estimate: Estimate


def make_plan(
    request: Request,
    before: Candidate,
    after: Candidate,
    option: Option,
    batch_size: int,
    fits: bool,
    reasons: tuple[str, ...],
    rejected: tuple[Rejected, ...],
) -> Plan:
    """The Plan that runs ``option`` on loaded batches of ``batch_size`` samples."""
    effective_before = request.batch_size * request.samples_per_batch
    effective = batch_size * request.samples_per_batch
    return Plan(
        precision=option.precision,
        micro_batch_size=batch_size // option.splits,
        accumulate=request.accumulate * option.splits,
        batch_size=batch_size,
        effective_batch_size=effective,
        precision_before=request.precision,
        accumulate_before=request.accumulate,
        batch_size_before=request.batch_size,
        effective_batch_size_before=effective_before,
        learning_rate_factor=learning_rate_factor(request.lr_rule, effective_before, effective),
        fits=fits,
        estimate=after.estimate,
        before=before.estimate,
        budget=request.budget,
        reasons=reasons,
        rejected=rejected,
        timeline=after.timeline,
        timeline_before=before.timeline,
    )


def unchanged(
    request: Request, before: Candidate, reasons: tuple[str, ...], rejected: tuple[Rejected, ...] = ()
) -> Plan:
    """The step as written, which fits."""
    option = Option(request.precision, 1)
    return make_plan(request, before, before, option, request.batch_size, True, reasons, rejected)


def fits_reasons(before: Candidate) -> tuple[str, ...]:
    """Why nothing has to change."""
    return ("The step fits as written.", *tier_reason(before.estimate))


def tier_reason(estimate: Estimate) -> tuple[str, ...]:
    """What has to be said of an answer that is not exact."""
    if estimate.tier == "partly symbolic":
        return ("Some sizes are bounds, not exact: see the notes.",)
    return ()
