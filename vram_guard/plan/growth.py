"""Growth: how large the batch can get within a target utilisation (pure over timelines)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.search_space import (
    Candidate,
    Option,
    Request,
    fits_reasons,
    make_plan,
    tier_reason,
    unchanged,
)
from vram_guard.plan.techniques import growth_multiples
from vram_guard.step import LARGEST_BATCH
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vram_guard.timeline import Estimate

#: Linear scaling held up to about this effective batch size on ImageNet (Goyal et al. 2017, fig. 1).
LINEAR_RULE_HELD_UNTIL = 8192


def grown(request: Request, before: Candidate) -> Plan:
    """The largest multiple of the batch below which every multiple on the list stays within the target."""
    target = int(request.budget.total * request.target_utilization)
    limit = min(request.usable(before.estimate), target)
    share = _("{share} of {total}", share=f"{request.target_utilization:.0%}", total=format_bytes(request.budget.total))
    if request.corrected(before.estimate) > limit:
        why = _("It already uses more than the target of {share}: the batch is not grown.", share=share)
        return unchanged(request, before, (*fits_reasons(before), why))
    most, cap_reason = _most_growth(request)
    best, factor = before, 1
    rejected: list[Rejected] = []
    for multiple in growth_multiples(most):
        size = multiple * request.batch_size
        estimate = before.timeline.at(size, settings=request.settings)
        if request.corrected(estimate) > limit or estimate.tier == "formula":
            rejected.append(_too_large(request, size, estimate, limit))
            break
        best, factor = Candidate(before.timeline, estimate), multiple
    else:
        if cap_reason:
            rejected.append(
                Rejected(_("more than batch {count}", count=factor * request.batch_size), None, 0, cap_reason)
            )
    if factor == 1:
        why = f" ({rejected[0].option}: {rejected[0].why})" if rejected else ""
        reasons = (*fits_reasons(before), _("The batch cannot grow{why}.", why=why))
        return unchanged(request, before, reasons, tuple(rejected))
    reasons = (
        _(
            "Memory used: {before} with batch {batch}, {after} with batch {grown}; the target is {share}.",
            before=_share(before, request),
            batch=request.batch_size,
            after=_share(best, request),
            grown=factor * request.batch_size,
            share=share,
        ),
        *_learning_rate_reasons(request, factor),
        *tier_reason(best.estimate),
    )
    size = factor * request.batch_size
    return make_plan(request, before, best, request.as_written, size, True, reasons, tuple(rejected))


def _share(candidate: Candidate, request: Request) -> str:
    return f"{request.corrected(candidate.estimate) / request.budget.total:.0%}"


def _most_growth(request: Request) -> tuple[int, str]:
    """The largest multiple that makes sense, and why not more ("" where only int32 limits it)."""
    most = LARGEST_BATCH // (request.batch_size * request.samples_per_batch)
    if request.dataset_size is None:
        return most, ""
    per_step = request.batch_size * request.samples_per_batch
    enough = request.dataset_size // per_step
    why = _(
        "the data set has {count} samples, and an epoch needs at least one optimizer step", count=request.dataset_size
    )
    return (enough, why) if enough < most else (most, "")


def _too_large(request: Request, size: int, estimate: Estimate, limit: int) -> Rejected:
    peak = request.corrected(estimate)
    missing = max(0, peak - limit)
    needed, over = format_bytes(peak), format_bytes(missing)
    why = _("needs {needed}, over the target by {missing}", needed=needed, missing=over)
    if not missing:
        why = _("could only be bounded from below")
    return Rejected(Option(request.precision, 1).words(size), peak, missing, why)


def _learning_rate_reasons(request: Request, factor: int) -> Iterator[str]:
    before = request.batch_size * request.samples_per_batch
    after = before * factor
    rate = learning_rate_factor(request.lr_rule, before, after)
    yield _(
        "The effective batch size grows from {before} to {after}: learning rates are multiplied by {rate} "
        "(rule: {rule}).",
        before=before,
        after=after,
        rate=f"{rate:g}",
        rule=request.lr_rule,
    )
    if rate > 1:
        yield _("Warm the learning rate up over the first 5 epochs or so (Goyal et al. 2017, section 2.2).")
    if after > LINEAR_RULE_HELD_UNTIL:
        yield _("Beyond {count} samples per step or so, scaled rates have lost accuracy.", count=LINEAR_RULE_HELD_UNTIL)
