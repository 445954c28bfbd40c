"""The content of a report, in words and rows: the same in a terminal (``text``) and on the page (``html``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vram_guard.budget import Budget
from vram_guard.language import _, marked
from vram_guard.limits import NAMED
from vram_guard.module_names import with_class
from vram_guard.plan.descriptions import COUNTED, EXPLANATIONS, Why
from vram_guard.plan.model import Plan
from vram_guard.plan.spread import LayoutPlan, Spread, format_seconds
from vram_guard.report.words import category_name, held_at_peak, peak_place
from vram_guard.timeline import CATEGORIES, Estimate, phase_and_step
from vram_guard.units import format_bytes

_TIERS = {
    "symbolic": marked("symbolic (every operator's memory is known)"),
    "partly symbolic": marked("partly symbolic (some sizes are bounds, see the notes)"),
    "formula": marked("formula (a lower bound: not known to fit)"),
}


#: A plan whose step takes so many times as long as written is said to be slow right behind the verdict.
MUCH_SLOWER = 3.0


class Section(NamedTuple):
    """A part of a report: a title above rows of equally many cells."""

    title: str
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    """Titles of the columns; empty where they need none."""
    figures: int = 0
    """Columns after the first one that hold figures."""

    @classmethod
    def listed(cls, title: str, lines: Sequence[str]) -> Section:
        """Lines below each other: rows of one cell."""
        return cls(title, [[line] for line in lines])


@dataclass(frozen=True)
class Content:
    """An answer and the budget for its tier; a plan brings its own budget."""

    answer: Plan | Estimate
    budget: Budget | None

    @classmethod
    def of(cls, answer: Plan | Estimate, budget: Budget | None) -> Content:
        """The content of a report."""
        if isinstance(answer, Plan):
            return cls(answer, answer.budget)
        return cls(answer, None if budget is None else budget.for_tier(answer.tier, answer.network))

    @property
    def plan(self) -> Plan | None:
        """The plan, where the answer is one."""
        return self.answer if isinstance(self.answer, Plan) else None

    @property
    def estimate(self) -> Estimate:
        """The step as it will run."""
        return self.answer.estimate if isinstance(self.answer, Plan) else self.answer

    @property
    def before(self) -> Estimate | None:
        """The step as written, where a plan changes it."""
        plan = self.plan
        return plan.before if plan is not None and plan.changed and plan.before != plan.estimate else None

    @property
    def peak(self) -> int:
        """Bytes that are compared with the budget."""
        return self.answer.peak if isinstance(self.answer, Plan) else self.answer.corrected(1.0)

    def verdict(self, budget: Budget) -> tuple[Literal["fits", "over", "unknown"], str, str]:
        """(kind, words, figures): whether the step fits, and by how much."""
        fitting = self.answer.fits if isinstance(self.answer, Plan) else self.answer.fits(budget)
        peak, usable = format_bytes(self.peak), format_bytes(budget.usable)
        between = format_bytes(abs(budget.usable - self.peak))
        if fitting:
            words = _("{peak} of {usable} usable, {spare} to spare", peak=peak, usable=usable, spare=between)
            return "fits", _("Fits"), words
        if self.peak > budget.usable:
            words = _("{peak} of {usable} usable, {over} too much", peak=peak, usable=usable, over=between)
            return "over", _("Does not fit"), words
        if self.plan is not None and self.plan.only_pins_fail:
            return "over", _("Not as pinned"), _("as written {peak} of {usable} usable", peak=peak, usable=usable)
        return "unknown", _("Not known to fit"), _("at least {peak} of {usable} usable", peak=peak, usable=usable)

    def headline(self, budget: Budget) -> str:
        """A first line for a step that fits by a change: how far it was from fitting, and the change; "" for others."""
        plan, before = self.plan, self.before
        if plan is None or before is None or not plan.fits:
            return ""
        if before.peak_reserved <= budget.usable:
            return ""  # it grows
        share = f"{before.peak_reserved / budget.usable:.0%}"
        if plan.spread is not None:
            more = plan.change_words
            return _("Only spread, it does not fit ({share}); fits with: {changes}", share=share, changes=more)
        return _("Does not fit as written ({share}); fits with: {changes}", share=share, changes=plan.verdict())

    def memory(self, most: int) -> Iterator[Section]:
        """The memory at the peak, where it is, and what the phases, modules and steps take; ``most`` of each list."""
        yield self._at_the_peak()
        yield Section(_("Peak"), self._peak_facts())
        yield self._phases()
        yield Section(_("Modules that hold most at the peak"), self._modules(most), figures=2)
        yield Section.listed(_("Memory that grows"), self.leaks())
        yield Section.listed(_("Notes"), list(map(str, self.estimate.notes)))

    def planned(self, most: int) -> Iterator[Section]:
        """What the plan changes, what it costs and why; nothing where the answer is an estimate."""
        plan = self.plan
        if plan is None:
            return
        changes = [(name, f"{before} -> {after}") for name, before, after in plan.changes()]
        unchanged = [] if plan.changed else [(_("nothing changes"), "")]
        facts = [*changes, *unchanged, *_cost_facts(plan), *_correction_facts(plan)]
        yield Section(_("Plan"), facts)
        yield Section("torch.compile", _compiled_facts(plan))
        if plan.spread is not None:
            yield Section(_("Over several GPUs"), plan.spread.facts())
            yield _ways(plan.spread)
        yield Section.listed(_("Why"), [str(one) for one in plan.reason_values if one.kind not in COUNTED])
        yield Section.listed(_("Alternatives considered, closest first"), _alternatives(plan, most))

    def _at_the_peak(self) -> Section:
        """What is alive at the peak, by category, and the totals."""

        def row(name: str, sizes: list[int]) -> list[str]:
            return [name, *map(format_bytes, sizes), self._share(sizes[-1])]

        both = [self.estimate] if self.before is None else [self.before, self.estimate]
        named = [unchanged_name(self.plan), _("planned")] if self.plan and self.before else [_("bytes")]
        held = {name: [one.breakdown.get(name, 0) for one in both] for name in CATEGORIES}
        rows = [
            *(row(category_name(name), sizes) for name, sizes in held.items() if any(sizes)),
            row(_("peak allocated"), [one.peak_allocated for one in both]),
            row(_("peak reserved"), [one.peak_reserved for one in both]),
        ]
        heads = [_("at the peak"), *named, _("share")]
        return Section(_("Memory use"), rows, heads, len(heads) - 1)

    def _peak_facts(self) -> list[tuple[str, str]]:
        """(name, value): what it was predicted for, where the peak is, and how far the answer can be trusted."""
        estimate = self.estimate
        return [
            (_("batch size"), str(estimate.batch_size)),
            (_("peak"), peak_place(estimate)),
            (_("answer"), _(_TIERS[estimate.tier])),
            *([] if estimate.releases is None else [(_("releases"), str(estimate.releases))]),
            *_range_facts(estimate),
        ]

    def brief(self) -> Iterator[Section]:
        """What there is to know in a dozen lines."""
        yield Section.listed(_("Memory that grows"), self.leaks())
        yield Section("", self._brief_facts())
        yield Section.listed("", self._brief_reasons())
        # Of an answer that is not exact, which points to them.
        if self.estimate.tier == "partly symbolic":
            yield Section.listed(_("Notes"), _at_most(NAMED, list(map(str, self.estimate.notes))))

    def _brief_facts(self) -> list[tuple[str, str]]:
        estimate, plan = self.estimate, self.plan
        amount = (_("peak reserved"), format_bytes(estimate.peak_reserved))
        facts = [
            amount if self.budget is None else (_("budget"), self.budget.explain(brief=True)),
            (_("peak"), peak_place(estimate)),
            (_("at the peak"), held_at_peak(estimate)),
            *([] if estimate.tier == "symbolic" else [(_("answer"), _(_TIERS[estimate.tier]))]),
            *_range_facts(estimate),
        ]
        if plan is None:
            return facts
        if plan.spread is not None:
            facts += plan.spread.facts()
        if not plan.changed:
            facts.append((_("plan"), _("nothing changes")))
        elif plan.fits:
            facts += _cost_facts(plan)
        return [*facts, *_correction_facts(plan), *_compiled_facts(plan)]

    def _brief_reasons(self) -> list[str]:
        """What the figures do not say: why nothing fits, what is not possible, which results change."""
        if self.plan is None:
            return []
        # Where something fits, a block that is left out is a detail of the plan; else it may be why nothing does.
        told = EXPLANATIONS if self.plan.fits else EXPLANATIONS - {Why.NOT_CHECKPOINTED, Why.NOT_CHECKPOINTED_INSIDE}
        return [str(one) for one in self.plan.reason_values if one.kind not in told | COUNTED]

    def _phases(self) -> Section:
        """The peak of each phase of the run; none where the step has no job."""
        rows = [
            [
                str(phase_and_step(phase)),
                format_bytes(phase.peak_allocated),
                format_bytes(phase.peak_reserved),
                _place(phase.module, phase.source),
            ]
            for phase in self.estimate.phases
        ]
        heads = [_("phase"), _("peak allocated"), _("peak reserved"), _("where")]
        return Section(_("Peak of each phase"), rows, heads, 2)

    def cautions(self) -> list[str]:
        """What the figures count, and a plan that is slow out of the ordinary: said right behind the verdict."""
        plan = self.plan
        said = [] if plan is None else [str(one) for one in plan.reason_values if one.kind in COUNTED]
        if plan is not None and plan.changed and plan.slowdown is not None and plan.slowdown >= MUCH_SLOWER:
            times = f"{plan.slowdown:.0f}"
            said.append(_("Each step takes about {factor} times as long as written (modelled).", factor=times))
        return said

    def leaks(self) -> list[str]:
        """The lines whose memory grows with every step, and when the budget is full."""
        lines = []
        for leak in self.estimate.leaks:
            amount = format_bytes(leak.bytes_per_step)
            place = _place(leak.module, leak.source) or leak.operator
            line = _("{amount} more with every step: {place}", amount=amount, place=place)
            lines.append(_("{line}, kept in {name}", line=line, name=leak.kept_in) if leak.kept_in else line)
        full = None if self.budget is None else self.estimate.steps_until_full(self.budget)
        if full is None:
            return lines
        steps = self.estimate.steps
        if steps is None or steps <= full:
            return [*lines, _("the budget is full after {count} steps", count=full)]
        said = _("the budget is full after {count} steps, and the run has at least {steps}", count=full, steps=steps)
        return [*lines, said]

    def _modules(self, most: int) -> list[tuple[str, str, str]]:
        """(name, bytes, share) of the modules that hold most at the peak, equal ones in one row."""
        groups = defaultdict[tuple[str, int], list[str]](list)
        for name, size in self.estimate.by_module.items():
            if size:
                groups[with_class(name, re.sub(r"\b\d+\b", "*", name)), size].append(name)
        rows = []
        for (shown, size), names in sorted(groups.items(), key=lambda group: -group[0][1] * len(group[1]))[:most]:
            name = shown if len(names) > 1 else with_class(names[0])
            amount = format_bytes(size)
            each = amount if len(names) == 1 else f"{len(names)} x {amount}"
            rows.append((name or _("(outside any module)"), each, self._share(size * len(names))))
        return rows

    def _share(self, size: int) -> str:
        whole = self.estimate.peak_allocated
        return f"{size / whole:.1%}" if size <= whole != 0 else ""


#: Reason of a range -> what is uncertain.
_UNCERTAIN = {
    "workspaces": marked("cuDNN's workspaces in float32 are unknown"),
    "transforms": marked("cuFFT's workspaces are unknown, its documentation allows 8 complex numbers for each element"),
    "streams": marked("memory that several CUDA streams use (record_stream) is free again when the GPU gets there"),
}


def _range_facts(estimate: Estimate) -> list[tuple[str, str]]:
    """(name, value): the range of the reserved peak with its reasons, and the cuDNN that was asked, where there are."""
    facts, asked = [], estimate.cudnn
    if estimate.peak_lower:
        words = _(
            "{low} or {high}: how CUDA places memory on this card is not known, and the larger amount counts",
            low=format_bytes(estimate.peak_lower),
            high=format_bytes(estimate.peak_reserved),
        )
        facts.append((_("placement of segments"), words))
    if estimate.peak_upper > estimate.peak_reserved:
        words = _(
            "{low} to {high}: {reasons}; up to {most}",
            reasons=_(", ").join(_(_UNCERTAIN[reason]) for reason in estimate.upper_reasons),
            low=format_bytes(estimate.peak_reserved),
            high=format_bytes(estimate.peak_upper),
            most=format_bytes(estimate.peak_upper - estimate.peak_reserved),
        )
        facts.append((_("range of the peak"), words))
    if asked is not None and asked.refused:
        facts.append((f"cuDNN {asked.release}".strip(), _("says no workspaces: {why}", why=asked.refused)))
    elif asked is not None:
        words = _("was asked for workspaces: {amount} of the peak", amount=format_bytes(estimate.cudnn_bytes))
        facts.append((f"cuDNN {asked.release}", words))
    return facts


def _place(module: str, source: str) -> str:
    return _(", ").join(filter(None, (with_class(module), source)))


def _cost_facts(plan: Plan) -> list[tuple[str, str]]:
    facts = []
    if plan.changed and plan.slowdown is not None and plan.before != plan.estimate:
        facts.append((_("modelled step time"), f"x {plan.slowdown:.2f}"))
    if plan.estimate.host_peak and plan.spread is None:  # which says it for a node
        facts.append((_("host memory"), format_bytes(plan.estimate.host_peak)))
    return facts


def _ways(spread: Spread) -> Section:
    """A row for each way; none where there was nothing to choose."""
    rows = [[way.words, *_figures(way), _verdict(way, spread)] for way in spread.ways]
    heads = [_("spread"), _("peak"), _("time per step"), _("answer")]
    return Section(_("Ways to spread it, the simplest first"), rows if len(rows) > 1 else (), heads, 2)


def _figures(way: LayoutPlan) -> list[str]:
    peak = "-" if way.peak is None else format_bytes(way.peak)
    return [peak, "-" if way.seconds is None else format_seconds(way.seconds)]


def _verdict(way: LayoutPlan, spread: Spread) -> str:
    if way.fits and way.layout == spread.layout:
        return _("taken")
    return _("fits; {why}", why=way.why) if way.fits else str(way.why)


def _correction_facts(plan: Plan) -> list[tuple[str, str]]:
    if plan.correction == 1:
        return []
    factor = f"{plan.correction:.3f}"
    words = _("x {factor} of the prediction: {peak}", factor=factor, peak=format_bytes(plan.peak))
    return [(_("measured in earlier runs"), words)]


def _compiled_facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, value): the compiled step beside the eager one, and where Dynamo ended graphs; none without a compiler."""
    compiled = plan.compiled
    if compiled is None:
        return []
    eager = (_("uncompiled"), _peaks(compiled.eager))
    if compiled.why:
        return [eager, (_("compiled"), _("not followed: {why}", why=compiled.why))]
    facts = [eager, (_("compiled"), _peaks(plan.estimate)), (_("graphs"), str(compiled.graphs))]
    return facts + [(_("graph break"), reason) for reason in compiled.breaks]


def _peaks(estimate: Estimate) -> str:
    allocated, reserved = format_bytes(estimate.peak_allocated), format_bytes(estimate.peak_reserved)
    return _("{allocated} allocated, {reserved} reserved", allocated=allocated, reserved=reserved)


def _alternatives(plan: Plan, most: int) -> list[str]:
    """The options that were not taken: those that fit too, then those that came closest to the budget."""
    closest = sorted(plan.rejected, key=lambda option: (not option.fits, option.missing == 0, option.missing))
    return _at_most(most, list(map(str, closest)))


def _at_most(most: int, lines: list[str]) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], _("and {count} more", count=more)] if more > 0 else lines


def unchanged_name(plan: Plan) -> str:
    """The name of the step before a plan's changes, which is spread over GPUs already where the plan spreads it."""
    return _("as written") if plan.spread is None else _("only spread")
