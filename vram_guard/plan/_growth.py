"""Growth: how large the batch can get within a target utilisation (pure over timelines)."""

from __future__ import annotations

from collections.abc import Iterator

from vram_guard.language import Message
from vram_guard.plan._answer import batch_reasons, make_plan, unchanged
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.learning_rate import learning_rate_factor, like_adam, rule_for
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.search_space import Candidate, Request
from vram_guard.plan.techniques import growth_multiples
from vram_guard.step import LARGEST_BATCH
from vram_guard.timeline import Estimate
from vram_guard.units import Amount

#: Linear scaling held up to about this effective batch size on ImageNet (Goyal et al. 2017, fig. 1).
LINEAR_RULE_HELD_UNTIL = 8192


def grown(request: Request, before: Candidate) -> Plan:
    """The largest multiple of the batch below which every multiple on the list stays within the target."""
    target = int(request.budget.total * request.target_utilization)
    limit = min(request.usable(before.estimate), target)
    share = {"share": f"{request.target_utilization:.0%}", "total": Amount(request.budget.total)}
    if request.corrected(before.estimate) > limit:
        return unchanged(request, before, (*batch_reasons(before), Reason(Why.ABOVE_TARGET, **share)))
    most, why_not_more = _most_growth(request)
    best, factor = before, 1
    rejected: list[Rejected] = []
    for multiple in growth_multiples(most):
        size = multiple * request.batch_size
        estimate = before.timeline.at(size, settings=request.settings)
        if request.corrected(estimate) > limit or not request.fits(estimate):
            rejected.append(_too_large(request, size, estimate, limit))
            break
        best, factor = Candidate(before.timeline, estimate), multiple
    else:
        if why_not_more is not None:
            tried = Message("more than batch {count}", count=factor * request.batch_size)
            rejected.append(Rejected(tried, None, 0, why_not_more))
    if factor == 1:
        why = Reason(Why.CANNOT_GROW)
        if rejected:
            why = Reason(Why.CANNOT_GROW_TO, option=rejected[0].tried, why=rejected[0].reason)
        return unchanged(request, before, (*batch_reasons(before), why), tuple(rejected))
    size = factor * request.batch_size
    used = Reason(
        Why.GROWN,
        before=_share(before, request),
        batch=request.batch_size,
        after=_share(best, request),
        grown=size,
        **share,
    )
    reasons = (used, *_learning_rate_reasons(request, factor, best.timeline.optimizer))
    return make_plan(request, before, best, request.as_written, size, True, reasons, tuple(rejected))


def _share(candidate: Candidate, request: Request) -> str:
    return f"{request.corrected(candidate.estimate) / request.budget.total:.0%}"


def _most_growth(request: Request) -> tuple[int, Reason | None]:
    """The largest multiple that makes sense, and why not more (None where only int32 limits it)."""
    per_step = request.batch_size * request.samples_per_batch
    most = LARGEST_BATCH // per_step
    if request.dataset_size is None or request.dataset_size // per_step >= most:
        return most, None
    return request.dataset_size // per_step, Reason(Why.DATA_SET_TOO_SMALL, count=request.dataset_size)


def _too_large(request: Request, size: int, estimate: Estimate, limit: int) -> Rejected:
    peak = request.corrected(estimate)
    missing = max(0, peak - limit)
    why = Reason(Why.LOWER_BOUND, peak=Amount(peak))
    if missing:
        why = Reason(Why.OVER_TARGET, peak=Amount(peak), missing=Amount(missing))
    return Rejected(Option(request.precision, 1).of(size), peak, missing, why)


def _learning_rate_reasons(request: Request, factor: int, optimizer: str) -> Iterator[Reason]:
    before = request.batch_size * request.samples_per_batch
    after = before * factor
    rule = rule_for(request.lr_rule, optimizer)
    rate = learning_rate_factor(rule, before, after)
    yield Reason(Why.LEARNING_RATE, before=before, after=after, rate=f"{rate:g}", rule=rule)
    if rate > 1:
        yield Reason(Why.WARM_UP)
    if like_adam(optimizer):
        yield Reason(Why.FOUND_FOR_ADAM)
    elif "sgd" in optimizer.lower():
        yield Reason(Why.FOUND_FOR_SGD)
    if after > LINEAR_RULE_HELD_UNTIL:
        yield Reason(Why.LARGE_BATCH, count=LINEAR_RULE_HELD_UNTIL)
