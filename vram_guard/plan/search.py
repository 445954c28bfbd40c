"""The search: the cheapest change that makes a step fit (pure over timelines and a cost model).

A step that fits as written is left alone. Otherwise every option stands in one fixed order, and the first in it that
fits is taken: cheapest first by the cost model; at the same cost (to a thousandth of the step as written) what
changes the numbers of the training least, then fewest micro-batches, then fewest treated blocks.

Options that differ only in how many blocks are checkpointed or offloaded form a family. Within one, cost and host
memory grow with the number of blocks and GPU memory shrinks, so the smallest number that fits is found by bisection,
and proven by a direct trace. Families are visited in the order of their cheapest member; the search ends at the first
family whose cheapest member costs more than what was found.

Neither the order nor an option's peak depends on the budget, and bisection probes a fixed tree of lengths: so a
bigger budget or one more allowed technique never leads to a later option, whatever fragmentation does to the peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.activations import peak_outside
from vram_guard.plan.descriptions import cheapest, recipe_words
from vram_guard.plan.growth import grown
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.search_space import (
    Candidate,
    Chain,
    Costs,
    Family,
    Option,
    Request,
    Timelines,
    fits_reasons,
    make_plan,
    tier_reason,
    unchanged,
)
from vram_guard.plan.techniques import uses_batch_norm
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Estimate

#: Costs that differ by less are equal: the model is not that good.
COST_STEP = 0.001

#: Traces that give the law of a step for every batch size.
LAW_TRACES = 2

Key = tuple[float, int, int, int, str]
_Group = tuple[str, "Recipe", "Chain | None"]


@dataclass
class _Trial:
    """Tries options one by one and remembers what was wrong with each group of them."""

    request: Request
    timelines: Timelines
    costs: Costs
    progress: Callable[[str], None]
    misses: dict[_Group, Rejected] = field(default_factory=dict)
    """The nearest miss of each group."""
    too_much_for_the_host: dict[_Group, Rejected] = field(default_factory=dict)
    hopeless: set[_Group] = field(default_factory=set)
    tried: dict[tuple[Option, bool], Candidate | None] = field(default_factory=dict)

    def candidate(self, option: Option, *, exact: bool = False) -> Candidate:
        size = self.request.batch_size // option.splits
        timeline = self.timelines.exact(option, size) if exact else self.timelines(option)
        return Candidate(timeline, timeline.at(size, settings=self.request.settings))

    def key(self, option: Option) -> Key:
        """The option's place in the fixed order."""
        recipe = option.recipe
        treated = len(recipe.checkpoint) + len(recipe.offload_activations)
        cost = round(self.costs.relative(option) / COST_STEP) * COST_STEP
        return cost, option.changes_numbers, option.splits, treated, repr(option)

    def fitting(self, option: Option, group: _Group, *, exact: bool = False) -> Candidate | None:
        """The option's prediction if it fits; otherwise the miss is noted."""
        if (option, exact) not in self.tried:
            self.tried[option, exact] = self._try(option, group, exact=exact)
        return self.tried[option, exact]

    def _try(self, option: Option, group: _Group, *, exact: bool) -> Candidate | None:
        words = option.words(self.request.batch_size)
        if self._lower_bound_exceeds(option, group):
            return None
        try:
            if self._no_form_helps(option, group, exact=exact):
                return None
            candidate = self.candidate(option, exact=exact)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            self.hopeless.add(group)  # it would fail again
            self._miss(
                group,
                Rejected(words, None, 0, _("the step fails there: {error}", error=f"{type(error).__name__}: {error}")),
            )
            return None
        rejected = self.refusal(words, candidate.estimate)
        if rejected is not None:
            self._miss(group, rejected)
            return None
        return candidate

    def _lower_bound_exceeds(self, option: Option, group: _Group) -> bool:
        bound, usable = self.costs.lower_bound(option), self.request.budget.usable
        if bound.size <= usable:
            return False
        why = _("needs at least {amount} for {parts} alone", amount=format_bytes(bound.size), parts=bound.of)
        self._miss(group, Rejected(option.words(self.request.batch_size), None, bound.size - usable, why))
        return True

    def _no_form_helps(self, option: Option, group: _Group, *, exact: bool) -> bool:
        """Whether forward and backward alone are too much: another form of the optimizer changes nothing of that."""
        if option.recipe.optimizer not in ("for-loop", "fused"):
            return False
        plain = option._replace(recipe=option.recipe.with_(optimizer="as-written"))
        size = self.request.batch_size // option.splits
        timeline = self.timelines.exact(plain, size) if exact else self.timelines(plain)
        least = peak_outside(timeline, "optimizer", size)
        missing = least - self.request.budget.usable
        if missing <= 0:
            return False
        why = _("needs at least {amount} outside the optimizer", amount=format_bytes(least))
        self._miss(group, Rejected(option.words(self.request.batch_size), None, missing, why))
        return True

    def refusal(self, words: str, estimate: Estimate) -> Rejected | None:
        """Why a prediction is not good enough; None where it is."""
        peak, usable = self.request.corrected(estimate), self.request.usable(estimate)
        if peak > usable:
            missing = peak - usable
            why = _("needs {peak}, misses by {missing}", peak=format_bytes(peak), missing=format_bytes(missing))
            return Rejected(words, peak, missing, why)
        if estimate.tier == "formula":
            why = _("needs at least {peak}, a lower bound that promises nothing", peak=format_bytes(peak))
            return Rejected(words, peak, 0, why)
        return None

    def host_suffices(self, option: Option, candidate: Candidate, group: _Group) -> bool:
        """Whether host memory holds what the option keeps there; otherwise that is noted."""
        host, usable = candidate.estimate.host_peak, self.request.host_usable
        if usable is None or host <= usable:
            return True
        why = _(
            "takes {amount} of host memory, of which {usable} are available",
            amount=format_bytes(host),
            usable=format_bytes(usable),
        )
        words, peak = option.words(self.request.batch_size), self.request.corrected(candidate.estimate)
        self.too_much_for_the_host.setdefault(group, Rejected(words, peak, 0, why))
        return False

    def _miss(self, group: _Group, rejected: Rejected) -> None:
        known = self.misses.get(group)
        if known is None or _nearness(rejected) < _nearness(known):
            self.misses[group] = rejected

    def smallest(self, family: Family, best: Key | None) -> tuple[int, Candidate] | None:
        """The smallest length of the family's chain that fits, with its prediction.

        None where there is none, or none that stands before ``best``.
        """
        group, lengths = family.group, family.lengths
        if group in self.hopeless:
            return None
        low, high = lengths[0] - 1, lengths[-1]
        if family.splits > 1 and self._improves(family, high, best):
            if self._lower_bound_exceeds(family.option(high), group):
                return None
            if not self._least_fits(family):
                self.hopeless.add(group)
                return None
        if not self._will_do(family, high, best, exact=self._directly(family)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._will_do(family, middle, best, exact=True):
                high = middle
            else:
                low = middle
        for length in range(high, lengths[-1] + 1):
            if not self._improves(family, length, best):
                return None
            # The law that was found at small sizes might not hold at the one that will run.
            candidate = self.fitting(family.option(length), group, exact=True)
            if candidate is not None:
                # The host holds more with every further block.
                return (length, candidate) if self.host_suffices(family.option(length), candidate, group) else None
        return None

    def _least_fits(self, family: Family) -> bool:
        """Whether the group's smallest micro-batches with every block treated fit: if not, no member will do."""
        least = family._replace(splits=self.request.space.splits[-1]).option(family.lengths[-1])
        return self.fitting(least, family.group, exact=self._directly(family)) is not None

    def _directly(self, family: Family) -> bool:
        """Whether direct traces are no more than the two that give the law for all sizes of a split step.

        Whole batches have one size only.
        """
        splits = self.request.space.splits
        return family.splits == 1 or len(splits) - (1 in splits) <= LAW_TRACES

    def _will_do(self, family: Family, length: int, best: Key | None, *, exact: bool) -> bool:
        """Whether this many blocks fit, or are more than would be taken anyhow: those are not worth a trace.

        Calling them fitting only leads to fewer blocks. What is found so is never later in the order under a bigger
        budget: both parts of the condition hold there whenever they hold here.
        """
        if not self._improves(family, length, best):
            return True
        return self.fitting(family.option(length), family.group, exact=exact) is not None

    def _improves(self, family: Family, length: int, best: Key | None) -> bool:
        return best is None or self.key(family.option(length)) < best


def _nearness(rejected: Rejected) -> tuple[bool, int]:
    return rejected.missing == 0, rejected.missing


def search(
    request: Request, timelines: Timelines, costs: Costs, progress: Callable[[str], None] = lambda _line: None
) -> Plan:
    """The plan for a request.

    Errors of the step as written reach the caller; where it fails under another option, that is rejected.

    Args:
        request: what is asked.
        timelines: of options.
        costs: what options cost.
        progress: called with a line of text before each family that has to be traced.
    """
    trial = _Trial(request, timelines, costs, progress)
    as_written = request.as_written
    before = trial.candidate(as_written)
    refusal = trial.refusal(as_written.words(request.batch_size), before.estimate)
    if refusal is None and as_written in request.space:
        return grown(request, before) if request.grow else unchanged(request, before, fits_reasons(before))
    if refusal is not None:
        trial.misses[as_written.precision, as_written.recipe, None] = refusal
    if before.estimate.tier == "formula":
        return _nothing_fits(trial, before)  # the step could not be followed: neither could any change of it
    best = _cheapest(trial)
    if best is None:
        return _nothing_fits(trial, before)
    return _changed(trial, before, *best)


def _cheapest(trial: _Trial) -> tuple[Option, Candidate] | None:
    families = sorted(((trial.key(f.option(f.lengths[0])), f) for f in trial.request.space.families()), key=_first)
    best: tuple[Key, Option, Candidate] | None = None
    for number, (key, family) in enumerate(families, 1):
        if best is not None and key >= best[0]:
            break
        if family.group not in trial.hopeless:
            cheapest = family.option(family.lengths[0]).words(trial.request.batch_size)
            trial.progress(
                _("trying {number} of {count} ways: {words}", number=number, count=len(families), words=cheapest)
            )
        found = trial.smallest(family, None if best is None else best[0])
        if found is None:
            continue
        option = family.option(found[0])
        reached = trial.key(option)
        if best is None or reached < best[0]:
            best = reached, option, found[1]
    return None if best is None else (best[1], best[2])


def _first(pair: tuple[Key, Family]) -> Key:
    return pair[0]


def _changed(trial: _Trial, before: Candidate, option: Option, after: Candidate) -> Plan:
    request = trial.request
    reasons = [_shortage(trial, before.estimate)]
    if option.precision != request.precision:
        reasons += request.reasons
    if option.splits > 1:
        reasons.append(
            _(
                "{count} equal micro-batches; the effective batch size stays, and with it learning rates, schedules "
                "and the number of optimizer steps.",
                count=option.splits,
            )
        )
        if uses_batch_norm(after.timeline):
            reasons.append(
                _(
                    "Batch normalisation takes its statistics over a micro-batch ({samples} samples instead of "
                    "{batch}): the result is close to the unsplit one, not equal.",
                    samples=request.batch_size // option.splits,
                    batch=request.batch_size,
                )
            )
    if option.recipe:
        reasons.append(_("{words}: as little of it as fits.", words="; ".join(recipe_words(option.recipe))))
    cost = trial.costs.relative(option)
    slowdown = round(cost, 4)
    reasons.append(cheapest(slowdown))
    reasons += tier_reason(after.estimate)
    reasons += request.space.notes
    rejected = (*_misses(trial), *_dearer(trial, option, cost))
    return make_plan(request, before, after, option, request.batch_size, True, tuple(reasons), rejected, slowdown)


def _misses(trial: _Trial) -> tuple[Rejected, ...]:
    # Two orders of the same blocks end in the same option.
    return tuple(dict.fromkeys((*trial.misses.values(), *trial.too_much_for_the_host.values())))


def _dearer(trial: _Trial, taken: Option, cost: float) -> list[Rejected]:
    """The simplest ways that were never tried, because they cost more than what was taken."""
    request, seen = trial.request, dict[str, Rejected]()
    for family in request.space.families():
        option = family.option(family.lengths[0])
        words = recipe_words(option.recipe)
        simple = (option.precision != request.precision) + (option.splits > 1) + len(words) == 1
        if not simple or option == taken or family.group in trial.misses:
            continue
        price = trial.costs.relative(option)
        name = option.words(request.batch_size)
        if price > cost:
            factor = f"{price:.2f}"
            why = _("costs {factor} times the step time", factor=factor)
            if family.chain:
                why = _("costs {factor} times the step time, and more with every block", factor=factor)
            seen.setdefault(name, Rejected(name, None, 0, why))
    return list(seen.values())


def _shortage(trial: _Trial, estimate: Estimate) -> str:
    peak, usable = trial.request.corrected(estimate), trial.request.usable(estimate)
    if peak <= usable and estimate.tier != "formula":
        return _("The step fits as written; what was pinned is changed all the same.")
    if peak <= usable:
        return _("The step as written could only be bounded from below, so it is not known to fit.")
    return _(
        "As written the step needs {peak}, {missing} more than the {usable} that may be used.",
        peak=format_bytes(peak),
        missing=format_bytes(peak - usable),
        usable=format_bytes(usable),
    )


def _nothing_fits(trial: _Trial, before: Candidate) -> Plan:
    request, rejected = trial.request, _misses(trial)
    missed = [option for option in rejected if option.missing > 0]
    nearest = min(missed, key=lambda option: option.missing, default=None)
    reasons = [_shortage(trial, before.estimate)]
    if nearest is not None and len(rejected) > 1:
        reasons.append(
            _(
                "Nothing that is allowed makes it fit. Nearest: {option}, short by {missing} ({count} bytes).",
                option=nearest.option,
                missing=format_bytes(nearest.missing),
                count=nearest.missing,
            )
        )
    if request.space.precisions == (request.precision,):
        reasons += request.reasons
    reasons += request.space.notes
    if request.space.splits == (1,) and request.batch_size > 1:
        reasons.append(_("Gradient accumulation was not allowed, or there are no gradients to accumulate."))
    if request.batch_size == 1:
        reasons.append(_("A batch of one sample cannot be split."))
    reasons.append(_("Nothing was changed."))
    return make_plan(
        request, before, before, request.as_written, request.batch_size, False, tuple(reasons), rejected, 1.0
    )
