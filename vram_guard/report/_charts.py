"""The timelines that a picture draws, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.plan.model import Plan
from vram_guard.report._content import unchanged_name
from vram_guard.report._walk import Stack, stack
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import format_bytes

#: As many moments as pixels across a picture: finer ones cannot be told apart.
COLUMNS = 900
#: Room above the highest curve for the peak's label.
HEADROOM = 1.18


@dataclass(frozen=True)
class Chart:
    """A chart of a step in its own units: events to the right, bytes upwards, both from 0.

    Attributes:
        caption: what it shows.
        timeline: its events.
        estimate: its figures.
        stack: the curves.
        usable: bytes of the budget; None: there is none.
        top: bytes at the end of the scale.
    """

    caption: str
    timeline: Timeline
    estimate: Estimate
    stack: Stack
    usable: int | None
    top: int

    @property
    def remark(self) -> str:
        """Its figures at a glance."""
        remark = _("peak reserved {peak}", peak=format_bytes(self.estimate.peak_reserved))
        if self.usable is not None:
            remark = _("{remark}, budget {usable}", remark=remark, usable=format_bytes(self.usable))
        return remark

    @property
    def description(self) -> str:
        """One sentence for those who cannot see it."""
        return _(
            "Memory over the step at batch size {batch_size}: peak {peak} allocated, {reserved} reserved.",
            batch_size=self.estimate.batch_size,
            peak=format_bytes(self.estimate.peak_allocated),
            reserved=format_bytes(self.estimate.peak_reserved),
        )


def timeline_charts(answer: Plan | Estimate, timeline: Timeline | None, budget: Budget | None) -> list[Chart]:
    """The step as written and as planned, on one scale; one chart for an estimate, or where nothing changes.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.

    Raises:
        InvalidInputError: there is no timeline.
    """
    timeline = timeline_of(answer, timeline)
    if not isinstance(answer, Plan):
        drawn = [(_with_precision(timeline.precision, answer.batch_size), timeline, answer.batch_size)]
    else:
        budget = answer.budget
        words = _with_precision(answer.precision_before, answer.batch_size_before)
        changed = answer.changed and answer.before != answer.estimate  # a plan may only spread a step
        name = unchanged_name(answer) if changed or answer.spread is None else _("planned")
        before = _("{name}: {words}", name=name, words=words)
        as_written = answer.timeline_before if changed else timeline
        drawn = [] if as_written is None else [(before, as_written, answer.batch_size_before)]
        if changed:
            words = _(", ").join([answer.precision, _planned_size(answer)])
            after = _("{name}: {words}", name=_("planned"), words=words)
            drawn.append((after, timeline, answer.micro_batch_size))
    usable = None if budget is None else budget.usable
    exact = [(caption, one.exact(size), size) for caption, one, size in drawn]
    top = _scale_top([one.at(size).peak_reserved for _caption, one, size in exact], usable)
    return [
        Chart(caption, one, one.at(size), stack(one, size, most=COLUMNS), usable, top) for caption, one, size in exact
    ]


def timeline_of(answer: Plan | Estimate, timeline: Timeline | None) -> Timeline:
    """The timeline of an answer.

    Args:
        answer: a plan, which brings it, or an estimate.
        timeline: what an estimate was read from.

    Raises:
        InvalidInputError: there is none.
    """
    found = answer.timeline if isinstance(answer, Plan) else timeline
    if found is None:
        raise InvalidInputError(_("this plan carries no timelines to draw; plans made by vram_guard.plan() do"))
    return found


def _with_precision(precision: str, batch_size: int) -> str:
    return _(", ").join([precision, _("batch {count}", count=batch_size)])


def _planned_size(plan: Plan) -> str:
    if plan.splits == 1:
        return _("batch {count}", count=plan.batch_size)
    words = _("{count} micro-batches of {size}", count=plan.splits, size=plan.micro_batch_size)
    return _("{words} (two are drawn)", words=words) if plan.splits > ROUNDS_FOLLOWED else words


def _scale_top(peaks: Sequence[int], usable: int | None) -> int:
    """The upper end of a scale for these peaks; a budget far above them is left outside."""
    highest = max(1, *peaks)
    if usable is not None and usable < 3 * highest:
        highest = max(highest, usable)
    return int(highest * HEADROOM) + 1
