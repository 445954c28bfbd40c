"""Answers: how what a search found becomes a Plan with its reasons."""

from __future__ import annotations

from vram_guard.allocator import with_expandable_segments
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, RelativeTime, Why
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.model import Plan, Rejected, nearest
from vram_guard.plan.search_space import Candidate, Request
from vram_guard.plan.step_time import card_of
from vram_guard.plan.techniques import uses_batch_norm
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard.timeline import Estimate
from vram_guard.units import Amount


def make_plan(
    request: Request,
    before: Candidate,
    after: Candidate,
    option: Option,
    batch_size: int,
    fits: bool,
    why: tuple[Reason, ...],
    rejected: tuple[Rejected, ...],
    slowdown: float | None = None,
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
        learning_rate_factor=learning_rate_factor(
            request.lr_rule, effective_before, effective, before.timeline.optimizer
        ),
        fits=fits,
        estimate=after.estimate,
        before=before.estimate,
        budget=request.budget.for_tier(after.estimate.tier, after.estimate.network),
        reason_values=why,
        rejected=rejected,
        recipe=option.recipe,
        slowdown=slowdown,
        correction=request.correction,
        timeline=after.timeline,
        timeline_before=before.timeline,
    )


def unchanged(
    request: Request, before: Candidate, why: tuple[Reason, ...], rejected: tuple[Rejected, ...] = ()
) -> Plan:
    """The step as written, which fits."""
    return make_plan(request, before, before, request.as_written, request.batch_size, True, why, rejected, 1.0)


def batch_reasons(before: Candidate) -> tuple[Reason, ...]:
    """A remark on a step whose batches do not grow with their size: most likely a mistake, which fits everywhere."""
    timeline, samples = before.timeline, before.estimate.batch_size
    if samples == 1 or timeline.retrace is not None or timeline.traced == (samples,):  # of this batch alone
        return ()
    if not any(block.category == "batch" for block in timeline.blocks):
        return ()
    sizes = (
        size for block in timeline.blocks for size in (block.size, *(block.scratch.quantities if block.scratch else ()))
    )
    return () if any(size.per_sample for size in sizes) else (Reason(Why.SAME_FOR_EVERY_BATCH, samples=samples),)


def changed(
    request: Request,
    before: Candidate,
    option: Option,
    after: Candidate,
    rejected: tuple[Rejected, ...],
    slowdown: float,
) -> Plan:
    """The step under the option that was chosen.

    Args:
        request: what was asked.
        before: the step as written.
        option: what was chosen.
        after: the step under it.
        rejected: what was not.
        slowdown: step time over the step time as written.
    """
    why = [shortage(request, before.estimate), *_margins(request, before.estimate, after.estimate)]
    why += _with_growing_segments(request, before)
    if option.precision != request.precision:
        why.append(request.why_precision)
    if option.splits > 1:
        why.append(Reason(Why.MICRO_BATCHES, count=option.splits))
        if uses_batch_norm(after.timeline):
            samples = request.batch_size // option.splits
            why.append(Reason(Why.BATCH_NORM, samples=samples, batch=request.batch_size))
    if option.recipe.expandable_segments:
        why.append(Reason(Why.EXPANDABLE, setting="=".join(with_expandable_segments())))
    why += (*request.why_not_checkpointed, *request.left_out)
    cheaper = any(option.reason.kind is Why.CHEAPER_AND_MORE_CHANGES for option in rejected)
    kind = Why.CHANGES_LEAST if cheaper else Why.CHEAPEST
    why += [Reason(kind, time=RelativeTime(slowdown)), *_modelled_on(request, after)]
    why += batch_reasons(before)
    return make_plan(request, before, after, option, request.batch_size, True, tuple(why), rejected, slowdown)


def _modelled_on(request: Request, after: Candidate) -> tuple[Reason, ...]:
    """The GPU that stands for a card that is not known: another one may rank the options otherwise."""
    if request.budget.gpu is not None:
        return ()
    card = card_of(None, after.timeline.compute_capability)
    major, minor = card.compute_capability
    return (Reason(Why.MODELLED_ON, name=card.name, version=f"{major}.{minor}"),)


def nothing_fits(request: Request, before: Candidate, rejected: tuple[Rejected, ...]) -> Plan:
    """The step as written, which is not known to fit, and neither is anything else."""
    fits = request.fits(before.estimate)
    rejected = as_known(request, before.estimate, rejected)
    if refusal := request.space.refusal:
        why = [] if fits else [shortage(request, before.estimate)]
        why += [Reason(Why.PINS_REFUSED, why=refusal), *request.left_out, Reason(Why.UNCHANGED)]
        return _as_written(request, before, tuple(why), rejected)
    why = [Reason(Why.PINS_DO_NOT_FIT) if fits else shortage(request, before.estimate)]
    written = request.as_written.of(request.batch_size)
    why += _with_growing_segments(request, before)
    closest = nearest(one for one in rejected if one.tried != written)
    if closest is not None:
        missing = closest.missing
        kind = Why.NEAREST_AT_LEAST if closest.peak_reserved is None else Why.NEAREST
        why.append(Reason(kind, option=closest.tried, missing=Amount(missing), count=missing))
    if request.space.precisions == (request.precision,):
        why.append(request.why_precision)
    if request.space.splits == (1,) and request.batch_size > 1:
        why.append(request.why_not_split)
    if request.batch_size == 1:
        why.append(Reason(Why.ONE_SAMPLE))
    no_blocks = () if fits else request.why_no_blocks
    why += (*batch_reasons(before), *request.why_not_checkpointed, *no_blocks, *request.left_out)
    why.append(Reason(Why.UNCHANGED))
    return _as_written(request, before, tuple(why), rejected)


def as_known(request: Request, before: Estimate, rejected: tuple[Rejected, ...]) -> tuple[Rejected, ...]:
    """The options with the peak of the step as written, of which a search may have known what it takes at least."""
    written, peak = request.as_written.of(request.batch_size), request.corrected(before)
    missing = peak - request.usable(before)
    if missing <= 0:
        return rejected
    known = Rejected(written, peak, missing, Reason(Why.OVER_BUDGET, peak=Amount(peak), missing=Amount(missing)))
    return tuple(known if one.tried == written and one.missing > 0 else one for one in rejected)


def _as_written(request: Request, before: Candidate, why: tuple[Reason, ...], rejected: tuple[Rejected, ...]) -> Plan:
    return make_plan(request, before, before, request.as_written, request.batch_size, False, why, rejected, 1.0)


def shortage(request: Request, estimate: Estimate) -> Reason:
    """The reason why the step is not left as it is written."""
    if request.fits(estimate):
        return Reason(Why.PINNED)
    peak, usable = request.corrected(estimate), request.usable(estimate)
    if peak <= usable:
        return Reason(Why.ONLY_BOUNDED)
    return Reason(Why.SHORTAGE, peak=Amount(peak), missing=Amount(peak - usable), usable=Amount(usable))


def _with_growing_segments(request: Request, before: Candidate) -> tuple[Reason, ...]:
    """A remark where the step as written would fit if the allocator's segments grew, which this plan may not choose."""
    least = before.estimate.peak_allocated
    if request.fits(before.estimate) or least > request.usable(before.estimate):
        return ()
    if any(recipe.expandable_segments for recipe in request.space.recipes):
        return ()
    settings = request.settings_under(AS_WRITTEN.with_(expandable_segments=True))
    grown = before.timeline.at(before.estimate.batch_size, settings=settings)
    if not request.fits(grown):
        return ()
    peak, setting = Amount(request.corrected(grown)), "=".join(with_expandable_segments())
    return (Reason(Why.EXPANDABLE_WOULD_FIT, peak=peak, setting=setting),)


def _margins(request: Request, before: Estimate, after: Estimate) -> tuple[Reason, ...]:
    """Why the usable amount as written is not that of the plan."""
    shares = [f"{request.budget.for_tier(one.tier, one.network).margin:.1%}" for one in (before, after)]
    return () if shares[0] == shares[1] else (Reason(Why.MARGINS, before=shares[0], after=shares[1]),)
