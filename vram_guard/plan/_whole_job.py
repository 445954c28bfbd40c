"""The whole job of a plan: the step that was chosen, followed once more with all that the run does besides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.job import Job, evenly
from vram_guard.language import Message, _
from vram_guard.limits import EVALUATIONS_TRIED
from vram_guard.plan._option import Option
from vram_guard.plan._search import search
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.model import Plan, SmallerEvaluation
from vram_guard.timeline import Estimate, PhasePeak, Timeline, phase_words
from vram_guard.units import Amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vram_guard.plan.search_space import Costs, Request, Timelines
    from vram_guard.plan.source import Source, TraceRequest

    Follow = Callable[[TraceRequest], Timeline]

_log = logging.getLogger(__name__)


class Smaller(NamedTuple):
    """A smaller batch of an evaluation."""

    asked: int
    """Samples of its batch as written."""
    size: int
    """Of the largest that fits; 0: none does."""
    timeline: Timeline | None = None
    """Of the whole run with it, where a framework's loaders can deliver it; None: it can only be proposed."""


def whole_job(job: Job, whole: Callable[[Job], Follow], batch_size: int) -> Follow:
    """Timelines of the step with its job: evaluations have batches of the loader's size, also where a plan cuts them.

    Args:
        job: of the step as written.
        whole: job -> timelines of the step with it.
        batch_size: of the loader, for the step as written.
    """
    uncut, cut = whole(job), whole(job.beside(batch_size))
    return lambda request: cut(request) if request.slices > 1 else uncut(request)


def with_whole_job(
    made: Plan,
    request: Request,
    whole: Timelines,
    costs: Costs,
    smaller: Callable[[Option, int, PhasePeak], Smaller | None],
    why_not: object,
    progress: Callable[[str], None],
) -> Plan:
    """The plan for the whole run. Where its job does not fit under the step's plan, it counts in the search.

    Args:
        made: the plan for the step alone.
        request: what is asked.
        whole: timelines of options with the job.
        costs: of options.
        smaller: (option, micro-batch size, phase of an evaluation) -> its batch size and the largest that fits.
        why_not: why batches of evaluations may not be made smaller; None: they may, where a framework does it.
        progress: called with a line of text before each slow part.
    """
    if not made.fits:  # neither does a run of such steps
        return replace(made, reason_values=(*made.reason_values, Reason(Why.FIRST_STEPS_ALONE)))
    option, size = Option(made.precision, made.splits, made.recipe), made.micro_batch_size
    progress(_("following the whole job"))
    try:
        timeline = whole.exact(option, size)
    except Exception:
        if option == request.as_written:
            raise
        return search(request, whole, costs, progress)  # which passes over what the job fails under
    estimate = timeline.at(size, settings=request.settings_under(option.recipe))
    fits = request.fits(estimate)
    if fits and size <= request.batch_size:
        return _as_followed(made, option, timeline, estimate, request, whole)
    if fits or not estimate.phases:  # without phases, later steps need more than the first two
        return search(request, whole, costs, progress)  # where batches grow, the target is one for the whole run
    highest = max(estimate.phases, key=lambda phase: phase.peak_reserved)
    cut = smaller(option, size, highest)
    if cut is not None and cut.timeline is not None and why_not is None and size <= request.batch_size:
        return _with_evaluation(made, option, cut, cut.timeline, estimate, highest, request, whole)
    planned = search(request, whole, costs, progress)
    why = list(_why(request, estimate, highest, cut, why_not, fits=planned.fits))
    return replace(planned, reason_values=(*why, *planned.reason_values))


def _as_followed(
    made: Plan, option: Option, timeline: Timeline, estimate: Estimate, request: Request, whole: Timelines
) -> Plan:
    """The plan with what its whole job takes, and what that of the step as written would."""
    before, timeline_before = estimate, timeline
    if (option, made.micro_batch_size) != (request.as_written, request.batch_size):
        timeline_before = whole.exact(request.as_written, request.batch_size)
        before = timeline_before.at(request.batch_size, settings=request.settings)
    budget = request.budget.for_tier(estimate.tier, estimate.network)
    return replace(
        made,
        estimate=estimate,
        timeline=timeline,
        before=before,
        timeline_before=timeline_before,
        budget=budget,
    )


def _with_evaluation(
    made: Plan,
    option: Option,
    cut: Smaller,
    timeline: Timeline,
    uncut: Estimate,
    phase: PhasePeak,
    request: Request,
    whole: Timelines,
) -> Plan:
    """The step's plan with smaller batches of an evaluation, for which alone it does not suffice."""
    estimate = timeline.at(made.micro_batch_size, settings=request.settings_under(option.recipe))
    followed = _as_followed(made, option, timeline, estimate, request, whole)
    if (option, made.micro_batch_size) == (request.as_written, request.batch_size):
        followed = replace(followed, before=uncut, timeline_before=whole.exact(option, made.micro_batch_size))
    why = (
        _too_large(request, uncut, phase),
        Reason(Why.EVALUATION_CUT, phase=phase_words(phase), size=cut.size, batch=cut.asked),
        *made.reason_values,
    )
    evaluation = SmallerEvaluation(phase.name, cut.asked, cut.size)
    return replace(followed, evaluation=evaluation, reason_values=why)


def _too_large(request: Request, estimate: Estimate, phase: PhasePeak) -> Reason:
    """The phase for which the step's own plan does not suffice."""
    peak, usable = request.corrected(estimate), request.usable(estimate)
    if peak > usable:
        amounts = {"peak": Amount(peak), "missing": Amount(peak - usable), "usable": Amount(usable)}
        return Reason(Why.PHASE_TOO_LARGE, phase=phase_words(phase), **amounts)
    unknown = next((one for one in estimate.phases if one.tier == "formula"), phase)
    return Reason(Why.PHASE_NOT_KNOWN, phase=phase_words(unknown), peak=Amount(unknown.peak_reserved))


def _why(
    request: Request, estimate: Estimate, phase: PhasePeak, smaller: Smaller | None, why_not: object, *, fits: bool
) -> Iterator[Reason]:
    """The phase for which the step's own plan does not suffice, and what else would."""
    yield _too_large(request, estimate, phase)
    if not fits:
        yield Reason(Why.STEP_DOES_NOT_HELP)
    words = phase_words(phase)
    if smaller is not None and smaller.size:
        if smaller.timeline is None or why_not is None:
            why_not = Message("values that are averaged batch by batch may come out different")
        yield Reason(Why.SMALLER_EVALUATION, phase=words, size=smaller.size, batch=smaller.asked, why=why_not)
    elif smaller is not None:
        yield Reason(Why.NO_EVALUATION, phase=words)


def smaller_evaluation(
    source: Source, request: Request, asking: Callable[[Follow], Follow]
) -> Callable[[Option, int, PhasePeak], Smaller | None]:
    """The search for the largest batch of an evaluation that fits beside a step; it says None for other phases.

    Args:
        source: with its job.
        request: what is asked of the plan.
        asking: what each trace runs in.
    """

    def halved(
        job: Job, phase: PhasePeak, follow: Callable[[Job], Timeline], size: int, option: Option
    ) -> Smaller | None:
        """The same for the evaluation of a framework: half its batch, or half of that: the first that fits."""
        asked = job.evaluation_batch_size(phase.name)
        if asked is None:
            return None
        settings = request.settings_under(option.recipe)
        try:
            for part in dict.fromkeys(evenly(asked, asked >> times) for times in range(1, asked.bit_length())):
                timeline = replace(follow(job.with_evaluation_batch_size(phase.name, part)), traced=(size,))
                if request.fits(timeline.at(size, settings=settings)):
                    return Smaller(asked, part, timeline)
        except Exception as error:  # noqa: BLE001 - the user's evaluation, which may not take smaller batches
            _log.info("no smaller batch of %s is proposed: %s: %s", phase.name, type(error).__name__, error)
            return None
        return Smaller(asked, 0)

    def largest(option: Option, size: int, phase: PhasePeak) -> Smaller | None:
        from vram_guard.simulate import law

        if source.job is None or source.whole is None:
            return None
        job, whole = source.job.beside(option.splits * size * source.batch_slices), source.whole
        evaluation = job.evaluation(phase.name, phase.label)
        traced = source.request(option.precision, option.splits, option.recipe, size)
        if evaluation is None:
            return halved(job, phase, lambda one: asking(whole(one))(traced), size, option)
        asked = evaluation.batch_size or size

        def most_of(batches: int) -> int:
            def follow(count: int) -> Timeline:
                timeline = asking(whole(job.with_evaluation(evaluation, count, batches)))(traced)
                return replace(timeline, traced=(count,)).on(request.budget.multiprocessors, request.budget.placement)

            found = law(follow, check_at=asked)
            return found.max_batch_size(request.budget, settings=request.settings, limit=asked)

        try:
            most, batches = asked, evaluation.batches
            # Smaller batches are more, and more is collected of more: until one fits so many times.
            for _round in range(EVALUATIONS_TRIED):
                most = min(most, most_of(batches))
                if not most or evaluation.batches_of(most) <= batches:
                    break
                batches = evaluation.batches_of(most)
            else:
                return None
        except Exception as error:  # noqa: BLE001 - the user's evaluation, which may not take batches of two samples
            _log.info("no smaller batch of %s is proposed: %s: %s", phase.name, type(error).__name__, error)
            return None
        return Smaller(asked, min(most, asked - 1))

    return largest
