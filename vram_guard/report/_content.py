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
from vram_guard.module_names import in_a_sentence, with_class
from vram_guard.plan.descriptions import COUNTED, EXPLANATIONS, Why
from vram_guard.plan.model import Plan
from vram_guard.printable import printable
from vram_guard.report._spread import count_rows, spread_rows
from vram_guard.report.categories import category_name
from vram_guard.timeline import CATEGORIES, STEP_PHASES, Estimate, phase_and_step
from vram_guard.units import format_bytes

#: Tier -> its name, where phases have different ones.
TIER_NAMES = {
    "symbolic": marked("symbolic"),
    "partly symbolic": marked("partly symbolic"),
    "formula": marked("a lower bound"),
}

_TIERS = {
    "symbolic": marked("symbolic (every operator's memory is known)"),
    "partly symbolic": marked("partly symbolic (some sizes are bounds, see the notes)"),
    "formula": marked("formula (a lower bound: not known to fit)"),
}

#: A plan whose step takes so many times as long as written is said to be slow right behind the verdict.
MUCH_SLOWER = 3.0
#: Host memory of a node with eight GPUs as many have it, in bytes (NVIDIA's data sheet of the DGX A100: 1 TB).
USUAL_NODE = 10**12


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

    @classmethod
    def table(cls, title: str, rows: Sequence[Sequence[str]]) -> Section:
        """Rows with two columns of figures, whose titles are the first row."""
        return cls(title, rows[1:], rows[0] if rows else (), 2)


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
            yield Section.table(_("Ways to spread it, the simplest first"), spread_rows(plan.spread))
            yield self.other_gpus()
        yield Section.listed(_("Why"), [str(one) for one in plan.reason_values if one.kind not in COUNTED])
        yield Section.listed(_("Alternatives considered, closest first"), _alternatives(plan, most))

    def other_gpus(self) -> Section:
        """The same training on other numbers of GPUs, where that was asked for."""
        spread = None if self.plan is None else self.plan.spread
        return Section.table(
            _("The same training on other numbers of GPUs"), [] if spread is None else count_rows(spread)
        )

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
        """(name, value): where the peak is, and how far the answer can be trusted."""
        estimate = self.estimate
        steps = estimate.peak_phase.name in (*STEP_PHASES, "setup")
        facts = [
            (_("batch size") if steps else _("batch size of training"), str(estimate.batch_size)),
            (_("phase"), str(phase_and_step(estimate.peak_phase))),
            (_("module"), with_class(estimate.peak_module)),
            (_("source"), estimate.peak_source),
            (_("operator"), estimate.peak_operator),
            (_("answer"), _(_TIERS[estimate.tier])),
            (_("releases"), "" if estimate.releases is None else str(estimate.releases)),
            (_("by CUDA stream"), _streams_in_words(estimate.by_stream)),
            *_range_facts(estimate),
        ]
        return [(name, printable(value, lines=False)) for name, value in (*facts, *self._would_fail()) if value]

    def _would_fail(self) -> list[tuple[str, str]]:
        point = self.estimate.out_of_memory
        if point is None:
            return []
        words = _(
            "{amount} asked for at {place}, {fragmented} fragmented",
            amount=format_bytes(point.requested),
            place=point.source or point.operator,
            fragmented=format_bytes(point.fragmented),
        )
        return [(_("would fail"), words)]

    def brief(self) -> Iterator[Section]:
        """What there is to know in a dozen lines."""
        yield Section.listed(_("Memory that grows"), self.leaks())
        yield Section("", self._brief_facts())
        yield self.other_gpus()
        yield Section.listed("", self._brief_reasons())
        # Of an answer that is not exact, whose reasons point to them.
        yield Section.listed(_("Notes"), self.notes(NAMED) if self.estimate.tier == "partly symbolic" else [])

    def _brief_facts(self) -> list[tuple[str, str]]:
        estimate = self.estimate
        held = sorted(estimate.breakdown.items(), key=lambda item: -item[1])[:NAMED]
        facts = [
            *([] if self.budget else [(_("peak reserved"), format_bytes(estimate.peak_reserved))]),
            *([] if self.budget is None else [(_("budget"), self.budget.explain(brief=True))]),
            (_("peak"), _peak_place(estimate)),
            (
                _("at the peak"),
                _(", ").join(f"{category_name(name)} {format_bytes(size)}" for name, size in held if size),
            ),
            (_("answer"), "" if estimate.tier == "symbolic" else _(_TIERS[estimate.tier])),
            *_range_facts(estimate),
            *self._would_fail(),
        ]
        if self.plan is not None and self.plan.spread is not None:
            facts += self.plan.spread.facts()
        if self.plan is not None:
            if not self.plan.changed:
                facts.append((_("plan"), _("nothing changes")))
            elif self.plan.fits:
                facts += _cost_facts(self.plan)
            facts += [*_correction_facts(self.plan), *_compiled_facts(self.plan)]
        return [(name, printable(value, lines=False)) for name, value in facts if value]

    def _brief_reasons(self) -> list[str]:
        """What the figures do not say: why nothing fits, what is not possible, which results change."""
        if self.plan is None:
            return []
        # Where something fits, a block that is left out is a detail of the plan; else it may be why nothing does.
        told = EXPLANATIONS if self.plan.fits else EXPLANATIONS - {Why.NOT_CHECKPOINTED}
        return [str(one) for one in self.plan.reason_values if one.kind not in told | COUNTED]

    def _phases(self) -> Section:
        """The peak of each phase of the run; none where the step has no job."""
        phases = self.estimate.phases
        differ = len({phase.tier for phase in phases}) > 1
        rows = [
            [
                str(phase_and_step(phase)),
                format_bytes(phase.peak_allocated),
                format_bytes(phase.peak_reserved),
                *([_(TIER_NAMES[phase.tier])] if differ else []),
                _place(phase.module, phase.source),
            ]
            for phase in phases
        ]
        answer = [_("answer")] if differ else []
        heads = [_("phase"), _("peak allocated"), _("peak reserved"), *answer, _("where")]
        return Section(_("Peak of each phase"), rows, heads, 2)

    def cautions(self) -> list[str]:
        """What the figures count, and what a plan costs out of the ordinary: said right behind the verdict."""
        plan = self.plan
        said = [str(one) for one in (() if plan is None else plan.reason_values) if one.kind in COUNTED]
        if plan is None or not plan.changed:
            return said
        on_node = 0 if plan.spread is None else plan.spread.host_per_node
        if plan.slowdown is not None and plan.slowdown >= MUCH_SLOWER:
            said.append(
                _("Each step takes about {factor} times as long as written (modelled).", factor=f"{plan.slowdown:.0f}")
            )
        if on_node > USUAL_NODE:
            amount = format_bytes(on_node)
            said.append(_("The plan needs {amount} of host memory on each node; many have 1 TB.", amount=amount))
        return said

    def leaks(self) -> list[str]:
        """The lines whose memory grows with every step, and when the budget is full."""
        lines = []
        for leak in self.estimate.leaks:
            amount = format_bytes(leak.bytes_per_step)
            place = _place(leak.module, leak.source) or leak.operator
            line = _("{amount} more with every step: {place}", amount=amount, place=place)
            name = printable(leak.kept_in, lines=False)
            lines.append(_("{line}, kept in {name}", line=line, name=name) if name else line)
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
            name = printable(shown if len(names) > 1 else with_class(names[0]), lines=False)
            amount = format_bytes(size)
            each = amount if len(names) == 1 else f"{len(names)} x {amount}"
            rows.append((name or _("(outside any module)"), each, self._share(size * len(names))))
        return rows

    def notes(self, most: int | None = None) -> list[str]:
        """The notes of the estimate; None: all of them."""
        lines = list(map(str, self.estimate.notes))
        return lines if most is None else _at_most(most, lines)

    def _share(self, size: int) -> str:
        whole = self.estimate.peak_allocated
        return f"{size / whole:.1%}" if size <= whole != 0 else ""


def _peak_place(estimate: Estimate) -> str:
    """Where the peak is: its phase, module, and line of the user's code, or else the operator."""
    place = estimate.peak_source or estimate.peak_operator
    words = (str(phase_and_step(estimate.peak_phase)), in_a_sentence(estimate.peak_module), place)
    return _(", ").join(filter(None, words))


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
    return printable(_(", ").join(filter(None, (with_class(module), source))), lines=False)


def _streams_in_words(sizes: Sequence[int]) -> str:
    """Bytes on each CUDA stream; "" where all are on the default one."""
    if not any(sizes[1:]):
        return ""
    return _(", ").join(
        f"{_('stream {number}', number=number) if number else _('default stream')} {format_bytes(size)}"
        for number, size in enumerate(sizes)
        if size
    )


def _cost_facts(plan: Plan) -> list[tuple[str, str]]:
    facts = []
    if plan.changed and plan.slowdown is not None and plan.before != plan.estimate:
        facts.append((_("modelled step time"), f"x {plan.slowdown:.2f}"))
    if plan.estimate.host_peak and plan.spread is None:  # which says it for a node
        facts.append((_("host memory"), format_bytes(plan.estimate.host_peak)))
    return facts


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
        return [eager, (_("compiled"), _("not followed: {why}", why=printable(compiled.why, lines=False)))]
    facts = [eager, (_("compiled"), _peaks(plan.estimate)), (_("graphs"), str(compiled.graphs))]
    return facts + [(_("graph break"), printable(reason, lines=False)) for reason in compiled.breaks]


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
