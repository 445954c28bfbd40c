"""Charts as values: every curve, scale, tick, mark and caption, as ``picture`` draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.module_names import with_class
from vram_guard.plan.model import Plan
from vram_guard.printable import printable
from vram_guard.report._content import unchanged_name
from vram_guard.report._walk import stack
from vram_guard.timeline import STEP_PHASES, Category, Estimate, Timeline, phase_words
from vram_guard.units import format_bytes

#: As many moments as pixels across a picture: finer ones cannot be told apart.
COLUMNS = 900
#: Room above the highest curve for the peak's label.
HEADROOM = 1.18

#: Phases narrower than this share of the width have no room for their name.
LEAST_LABELLED = 0.05


class Span(NamedTuple):
    """A phase or an optimizer step, up to before ``end``; without a name where there is no room for it."""

    name: str
    start: int
    end: int
    shaded: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of a step in its own units: events to the right, bytes upwards.

    Attributes:
        caption, remark: what it shows, and its figures at a glance.
        description: one sentence for those who cannot see it.
        last, top: the ends of the scales, which begin at 0.
        curve: reserved bytes at ``xs``.
        layers: allocated bytes at ``xs`` by category, the first at the bottom.
        limit: the budget, where it is not beyond the scale.
        peak, peak_event: allocated bytes at their highest, and where.
        label, label_height: lines beside the peak, and the bytes above which they stand.
    """

    caption: str
    remark: str
    description: str
    last: int
    top: int
    xs: Sequence[int]
    curve: Sequence[int]
    layers: Mapping[Category, Sequence[int]]
    limit: int | None
    peak: int
    peak_event: int
    label: Sequence[str]
    label_height: int
    phases: Sequence[Span]
    steps: Sequence[Span]

    @property
    def byte_unit(self) -> tuple[int, str]:
        """(bytes, name) of the unit that suits the scale."""
        units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
        return next((unit, name) for unit, name in units if self.top >= unit)

    def x_ticks(self) -> list[float]:
        """Whole numbers below the scale."""
        return [value for value in round_values(self.last) if value == int(value)]

    def y_ticks(self) -> list[float]:
        """Round numbers of :attr:`byte_unit`."""
        return round_values(self.top / self.byte_unit[0])


def timeline_charts(
    answer: Plan | Estimate,
    timeline: Timeline | None,
    budget: Budget | None,
) -> list[Chart]:
    """The step as written and as planned, on one scale; one chart for an estimate, or where nothing changes.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.

    Raises:
        InvalidInputError: there is no timeline.
    """
    drawn: list[tuple[str, Timeline | None, int]]
    if not isinstance(answer, Plan):
        drawn = [("", timeline, answer.batch_size)]
    else:
        timeline, budget = answer.timeline, answer.budget
        size = _("batch {count}", count=answer.batch_size_before)
        words = _(", ").join([answer.precision_before, size])
        changed = answer.changed and answer.before != answer.estimate  # a plan may only spread a step
        name = unchanged_name(answer) if changed or answer.spread is None else _("planned")
        before = _("{name}: {words}", name=name, words=words)
        drawn = [(before, answer.timeline_before if changed else timeline, answer.batch_size_before)]
        if changed:
            words = _(", ").join([answer.precision, _planned_size(answer)])
            after = _("{name}: {words}", name=_("planned"), words=words)
            drawn.append((after, timeline, answer.micro_batch_size))
    if timeline is None:
        raise no_timeline()
    charts = [(caption, one.exact(size), size) for caption, one, size in drawn if one is not None]
    peaks = [one.at(size).peak_reserved for _caption, one, size in charts]
    usable = None if budget is None else budget.usable
    top = _scale_top(peaks, usable)
    return [_timeline_chart(caption, one, size, usable, top) for caption, one, size in charts]


def no_timeline() -> InvalidInputError:
    """The error where there is nothing to draw."""
    return InvalidInputError(_("this plan carries no timelines to draw; plans made by vram_guard.plan() do"))


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


def _timeline_chart(
    caption: str,
    timeline: Timeline,
    batch_size: int,
    usable: int | None,
    top: int,
) -> Chart:
    drawn = stack(timeline, batch_size, most=COLUMNS)
    estimate = timeline.at(batch_size)
    event = timeline.replay(batch_size).peak_event
    count = len(timeline.events)
    peak, reserved = format_bytes(estimate.peak_allocated), format_bytes(estimate.peak_reserved)
    remark = _("peak reserved {peak}", peak=reserved)
    if usable is not None:
        remark = _("{remark}, budget {usable}", remark=remark, usable=format_bytes(usable))
    description = _(
        "Memory over the step at batch size {batch_size}: peak {peak} allocated, {reserved} reserved.",
        batch_size=batch_size,
        peak=peak,
        reserved=reserved,
    )
    first = (_("peak {amount}", amount=peak), str(phase_words(estimate.peak_phase)), with_class(estimate.peak_module))
    second = (estimate.peak_source, estimate.peak_operator)
    lines = [printable(_(", ").join(filter(None, parts)), lines=False) for parts in (first, second)]
    around = [size for at, size in zip(drawn.events, drawn.reserved, strict=True) if at <= event]
    return Chart(
        caption=caption or _(", ").join([timeline.precision, _("batch {count}", count=batch_size)]),
        remark=remark,
        description=description,
        last=max(1, count - 1),
        top=top,
        xs=drawn.events,
        curve=drawn.reserved,
        layers={category: sizes for category, sizes in drawn.layers.items() if any(sizes)},
        limit=None if usable is None or usable > top else usable,
        peak=estimate.peak_allocated,
        peak_event=event,
        label=[*filter(None, lines)],
        label_height=max(around, default=0),
        phases=_phases(timeline),
        steps=_steps(timeline),
    )


def _phases(timeline: Timeline) -> list[Span]:
    count = len(timeline.events)
    spans = []
    for index, (phase, end) in enumerate(timeline.spans()):
        name = str(phase_words(phase)) if end - phase.start >= LEAST_LABELLED * count else ""
        spans.append(Span(name, phase.start, end, shaded=index % 2 == 1 and end > phase.start))
    return spans


def _steps(timeline: Timeline) -> list[Span]:
    spans: dict[int, Span] = {}
    for phase, end in timeline.spans():
        if phase.step and phase.name in STEP_PHASES:
            start = spans[phase.step].start if phase.step in spans else phase.start
            spans[phase.step] = Span(_("step {count}", count=phase.step), start, end)
    return list(spans.values())


def round_values(end: float, most: int = 7) -> list[float]:
    """At most ``most`` values from 0 to ``end``, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(max(end, 1e-9) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= most)
    return [*accumulate([step] * int(end / step), initial=0.0)]
