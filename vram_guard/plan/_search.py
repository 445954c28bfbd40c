"""The search: the cheapest change that makes a step fit (pure over timelines and a cost model).

A step that fits as written is left alone. Otherwise every option stands in one fixed order, and the first in it that
fits is taken: cheapest first by the cost model, where another kind of change has to save more than the model can tell
apart (:mod:`vram_guard.plan._order`).

Options that differ only in how many blocks are checkpointed or offloaded form a family. Within one, cost and host
memory grow with the number of blocks and GPU memory shrinks, so the smallest number that fits is found by bisection,
and proven by a direct trace. Families are visited in the order of their first members; the search ends at the first
family whose first member stands behind what was found.

Neither the order nor an option's peak depends on the budget, and bisection probes a fixed tree of lengths: so a
bigger budget or one more allowed technique never leads to a later option, whatever fragmentation does to the peaks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.language import _
from vram_guard.limits import MOST_NEIGHBOURS
from vram_guard.plan._activations import peak_outside
from vram_guard.plan._answer import batch_reasons, changed, nothing_fits, unchanged
from vram_guard.plan._growth import grown
from vram_guard.plan._option import Option
from vram_guard.plan._order import TOLERANCE, Key, key, treated
from vram_guard.plan.descriptions import Reason, RelativeTime, Why, recipe_words
from vram_guard.plan.model import Plan, Rejected
from vram_guard.plan.search_space import (
    BlockPrefix,
    Candidate,
    Candidates,
    Costs,
    OptionFamily,
    Request,
    SlicePrefix,
    Timelines,
)
from vram_guard.units import Amount

if TYPE_CHECKING:
    from vram_guard.techniques.recipe import Recipe
    from vram_guard.timeline import Estimate, Timeline

#: Traces that give the law of a step for every batch size.
LAW_TRACES = 2

_Group = tuple[str, "Recipe", "BlockPrefix | SlicePrefix | None"]


@dataclass
class _Trial:
    """Tries options one by one and remembers what was wrong with each group of them."""

    request: Request
    timelines: Timelines
    costs: Costs
    progress: Callable[[str], None]
    candidates: Candidates = field(default_factory=dict)
    """Predictions, unless they are proofs."""
    misses: dict[_Group, tuple[Option, Rejected]] = field(default_factory=dict)
    """The nearest miss of each group."""
    too_much_for_the_host: dict[_Group, tuple[Option, Rejected]] = field(default_factory=dict)
    infeasible: set[_Group] = field(default_factory=set)
    tried: dict[tuple[Option, bool], Candidate | None] = field(default_factory=dict)
    composed_misses: dict[Option, tuple[_Group, int]] = field(default_factory=dict)
    """Options that do not fit as composed: their group, and the bytes that are missing."""
    confirmed: list[Option] = field(default_factory=list)
    """Those of which a trace has allocated what had been composed, event by event."""
    said: set[str] = field(default_factory=set)

    def size(self, option: Option) -> int:
        """Samples of a micro-batch."""
        return self.request.batch_size // option.splits

    def candidate(self, option: Option, *, exact: bool = False, proof: bool = False) -> Candidate:
        known = None if proof else self.candidates.get((option, exact))
        if known is not None:
            return known
        size = self.size(option)
        if proof:
            timeline = self.timelines.direct(option, size)
        else:
            timeline = self.timelines.exact(option, size) if exact else self.timelines(option)
        found = Candidate(timeline, timeline.at(size, settings=self.request.settings_under(option.recipe)))
        self.candidates[option, exact or proof] = found
        return found

    def say(self, line: str) -> None:
        """A line of progress, once."""
        if line not in self.said:
            self.said.add(line)
            self.progress(line)

    def prove(self, option: Option, group: _Group) -> bool:
        """Trace an option that was composed: what the trace says replaces what was known of it.

        Returns:
            True if the trace says the same: that it fits, or does not. Otherwise nothing is known any more of options
            that were composed of the same timelines.
        """
        before = self.tried.get((option, True)) is not None
        composed = {known for known, _exact in self.tried if self.is_composed(known)}
        self._forget({option})
        said = self.candidates.pop((option, True), None)
        found = self._try(option, group, exact=True, proof=True)
        self.tried[option, False] = self.tried[option, True] = found
        traced = self.candidates.get((option, True))
        if (
            said is not None
            and traced is not None
            and self.timelines.treats_equal_blocks(option)
            and _same_memory(said.timeline, traced.timeline, self.size(option))
        ):
            self.confirmed.append(option)
        if before == (found is not None):
            return True
        self._distrust(option)
        self.infeasible.clear()
        self._forget(composed - {option})
        return False

    def _distrust(self, option: Option) -> None:
        self.candidates.clear()
        self.timelines.distrust(option)

    def _forget(self, options: set[Option]) -> None:
        """Nothing is known of these options."""
        unordered = {option.unordered for option in options}
        self.tried = {key: found for key, found in self.tried.items() if key[0] not in options}
        self.composed_misses = {key: miss for key, miss in self.composed_misses.items() if key not in options}
        self.misses = {key: miss for key, miss in self.misses.items() if miss[0] not in unordered}

    def is_confirmed(self, option: Option) -> bool:
        """True if a trace has shown what the option is composed of to be right."""
        return any(self.stands_for(known, option) for known in self.confirmed)

    def stands_for(self, traced: Option, other: Option) -> bool:
        """True if another option is composed of nothing but what one that is traced is composed of.

        Of blocks that are not equal, others than those that are traced so may be composed wrongly.
        """
        equal = self.timelines.treats_equal_blocks
        (without, kinds), own = (_Composition.of(option, self.request.space.blocks) for option in (other, traced))
        return without == own.without and kinds <= own.kinds and equal(traced) and equal(other)

    def is_composed(self, option: Option) -> bool:
        """True if nothing but composition says what the option takes."""
        return self.timelines.composed(option, self.size(option))

    def between(self, family: OptionFamily, least: float, most: float) -> list[Option]:
        """The family's options that cost so much; each further block costs something."""

        def cost(length: int) -> float:
            return self.costs.relative(family.option(length))

        lengths = family.lengths
        if cost(lengths[0]) >= most or cost(lengths[-1]) < least:
            return []
        first, end = (bisect_left(lengths, limit, key=cost) for limit in (least, most))
        return [family.option(length) for length in lengths[first:end]]

    def first_known_to_fit(self, options: Sequence[Option]) -> tuple[Option, int] | None:
        """The first of a family's options that fits, with its peak, as far as that is known without another trace."""
        found, low, high = None, 0, len(options)
        while low < high:
            middle = high - 1 if found is None else (low + high) // 2
            option = options[middle]
            if not self.timelines.known(option, self.size(option)) or self.costs.lower_bound(option).size > (
                self.request.most_usable
            ):
                return found
            estimate = self.candidate(option, exact=True).estimate
            host, usable = estimate.host_peak, self.request.host_usable
            if self.request.fits(estimate) and (usable is None or host <= usable):
                found, high = (option, self.request.corrected(estimate)), middle
            elif found is None:
                return None
            else:
                low = middle + 1
        return found

    def nearest_composed_miss(self, best: Key | None) -> tuple[Option, _Group] | None:
        """Of the options before ``best`` that do not fit as composed, the one that is missing least."""
        before = [option for option in self.composed_misses if best is None or self.key(option) < best]
        if not before:
            return None
        nearest = min(before, key=lambda option: (self.composed_misses[option][1], self.key(option)))
        return nearest, self.composed_misses[nearest][0]

    def key(self, option: Option) -> Key:
        """The option's place in the fixed order."""
        return key(option, self.costs.relative(option), self.request.precision, self.request.space.blocks)

    def fitting(self, option: Option, group: _Group, *, exact: bool = False) -> Candidate | None:
        """The option's prediction if it fits; otherwise the miss is noted."""
        if (option, exact) not in self.tried:
            self.tried[option, exact] = self._try(option, group, exact=exact)
        return self.tried[option, exact]

    def _try(self, option: Option, group: _Group, *, exact: bool, proof: bool = False) -> Candidate | None:
        if self._lower_bound_exceeds(option, group):
            return None
        try:
            if self._optimizer_form_useless(option, group, exact=exact):
                return None
            candidate = self.candidate(option, exact=exact, proof=proof)
        except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
            if not proof and self.is_composed(option):
                self._distrust(option)
                return self._try(option, group, exact=exact)
            self.infeasible.add(group)  # it would fail again
            self._miss(option, group, Reason(Why.FAILS, error=f"{type(error).__name__}: {error}"), 0)
            return None
        if not self.misses_budget(option, group, candidate.estimate):
            return candidate
        if not proof and self.is_composed(option):
            over = self.request.corrected(candidate.estimate) - self.request.usable(candidate.estimate)
            self.composed_misses[option] = group, over
        return None

    def _lower_bound_exceeds(self, option: Option, group: _Group) -> bool:
        bound = self.costs.lower_bound(option)
        missing = bound.size - self.request.most_usable
        if missing > 0:
            self._miss(option, group, Reason(bound.why, amount=Amount(bound.size)), missing)
        return missing > 0

    def _too_large(self, option: Option, group: _Group) -> bool:
        """True if what is known of the option, or a few of the model's blocks alone, exceed the budget."""
        if self._lower_bound_exceeds(option, group):
            return True
        least = self.timelines.least(option, self.size(option))
        missing = least - self.request.most_usable
        if missing > 0:
            self._miss(option, group, Reason(Why.NEEDS_FEW_BLOCKS, amount=Amount(least)), missing)
        return missing > 0

    def _optimizer_form_useless(self, option: Option, group: _Group, *, exact: bool) -> bool:
        """True if forward and backward alone exceed the budget: another form of the optimizer does not help then."""
        if option.recipe.optimizer not in ("for-loop", "fused"):
            return False
        plain = option._replace(recipe=option.recipe.with_(optimizer="as-written"))
        size = self.request.batch_size // option.splits
        timeline = self.timelines.exact(plain, size) if exact else self.timelines(plain)
        least = peak_outside(timeline, "optimizer", size)
        missing = least - self.request.most_usable
        if missing > 0:
            self._miss(option, group, Reason(Why.NEEDS_OUTSIDE_OPTIMIZER, amount=Amount(least)), missing)
        return missing > 0

    def misses_budget(self, option: Option, group: _Group, estimate: Estimate) -> bool:
        """True if a prediction is not good enough; the rejected option is noted."""
        if self.request.fits(estimate):
            return False
        peak = self.request.corrected(estimate)
        missing = max(0, peak - self.request.usable(estimate))
        why = Reason(Why.LOWER_BOUND, peak=Amount(peak))
        if missing:
            why = Reason(Why.OVER_BUDGET, peak=Amount(peak), missing=Amount(missing))
        self._miss(option, group, why, missing, peak)
        return True

    def host_suffices(self, option: Option, candidate: Candidate, group: _Group) -> bool:
        """True if host memory holds what the option keeps there; otherwise that is noted."""
        host, usable = candidate.estimate.host_peak, self.request.host_usable
        if usable is None or host <= usable:
            return True
        why = Reason(Why.HOST_MEMORY, amount=Amount(host), usable=Amount(usable))
        peak = self.request.corrected(candidate.estimate)
        rejected = Rejected(option.of(self.request.batch_size), peak, 0, why)
        self.too_much_for_the_host.setdefault(group, (option.unordered, rejected))
        return False

    def _miss(self, option: Option, group: _Group, why: Reason, missing: int, peak: int | None = None) -> None:
        rejected, known = Rejected(option.of(self.request.batch_size), peak, missing, why), self.misses.get(group)
        if known is None or _nearness(rejected) < _nearness(known[1]):
            self.misses[group] = option.unordered, rejected

    def rejected(self) -> tuple[Rejected, ...]:
        """Every nearest miss; two orders of the same blocks end in the same option, which counts once."""
        different: dict[object, Rejected] = {}
        for option, miss in (*self.misses.values(), *self.too_much_for_the_host.values()):
            different.setdefault((option, miss.peak_reserved, miss.missing), miss)
        return tuple(different.values())

    def smallest(self, family: OptionFamily, best: Key | None) -> tuple[int, Candidate] | None:
        """The smallest length of the family's prefix that fits, with its prediction.

        None where there is none, or none that stands before ``best``.
        """
        group, lengths = family.group, family.lengths
        if group in self.infeasible:
            return None
        low, high = lengths[0] - 1, lengths[-1]
        if family.splits > 1 and self._improves(family, high, best):
            if self._lower_bound_exceeds(family.option(high), group):
                return None
            if not self._least_fits(family):
                self.infeasible.add(group)
                return None
        elif self._improves(family, high, best) and self._too_large(family.option(high), group):
            return None
        if not self._fits_or_dominated(family, high, best, exact=self._directly(family)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits_or_dominated(family, middle, best, exact=True):
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

    def _least_fits(self, family: OptionFamily) -> bool:
        """True if the group's smallest micro-batches with every block treated fit: if not, no member will do."""
        least = family._replace(splits=self.request.space.splits[-1]).option(family.lengths[-1])
        if self._too_large(least, family.group):
            return False
        return self.fitting(least, family.group, exact=self._directly(family)) is not None

    def _directly(self, family: OptionFamily) -> bool:
        """True if direct traces are no more than the two that give the law for all sizes of a split step.

        Whole batches have one size only.
        """
        splits = self.request.space.splits
        return family.splits == 1 or len(splits) - (1 in splits) <= LAW_TRACES

    def _fits_or_dominated(self, family: OptionFamily, length: int, best: Key | None, *, exact: bool) -> bool:
        """True if this many blocks fit, or are more than would be taken anyhow: those are not worth a trace.

        Calling them fitting only leads to fewer blocks. What is found so is never later in the order under a bigger
        budget: both parts of the condition hold there whenever they hold here.
        """
        if not self._improves(family, length, best):
            return True
        return self.fitting(family.option(length), family.group, exact=exact) is not None

    def _improves(self, family: OptionFamily, length: int, best: Key | None) -> bool:
        option = family.option(length)
        return self.affordable(option) and (best is None or self.key(option) < best)

    def affordable(self, option: Option) -> bool:
        """True if the option costs no more than is worth trying."""
        return self.request.dearest is None or self.costs.relative(option) < self.request.dearest


def _nearness(rejected: Rejected) -> tuple[bool, int]:
    return rejected.missing == 0, rejected.missing


def search(
    request: Request,
    timelines: Timelines,
    costs: Costs,
    progress: Callable[[str], None] = lambda _line: None,
    candidates: Candidates | None = None,
) -> Plan:
    """The plan for a request.

    Errors of the step as written reach the caller; where it fails under another option, that is rejected.

    Args:
        request: what is asked.
        timelines: of options.
        costs: what options cost.
        progress: called with a line of text before each family that has to be traced.
        candidates: predictions of an earlier search with the same timelines and settings; those of this one are added.
    """
    trial = _Trial(request, timelines, costs, progress, {} if candidates is None else candidates)
    as_written = request.as_written
    before = trial.candidate(as_written)
    group = OptionFamily(as_written.precision, as_written.splits, as_written.recipe, None).group
    if request.thorough and request.fits(before.estimate):
        before = trial.candidate(as_written, exact=True)
    if not trial.misses_budget(as_written, group, before.estimate) and as_written in request.space:
        return _grown(request, timelines, before) if request.grow else unchanged(request, before, batch_reasons(before))
    # A step that could not be followed: neither could any change of it.
    try:
        best = None if before.estimate.tier == "formula" else _proven(trial)
    finally:
        timelines.end()
    if best is None:
        return nothing_fits(request, before, trial.rejected())
    option, after = best.option, best.candidate
    cost = trial.costs.relative(option)
    rejected = (*_neighbours(trial, best), *trial.rejected(), *_costlier(trial, option, cost))
    return changed(request, before, option, after, rejected, round(cost, 4))


def _grown(request: Request, timelines: Timelines, before: Candidate) -> Plan:
    """The plan with a larger batch, whose size is traced: where it does not follow the law, every size is."""
    made = grown(request, before)
    size = made.batch_size
    if size == request.batch_size or not request.thorough or before.timeline.retrace is not None:
        return made
    try:
        timeline = timelines.direct(request.as_written, size)
        if timeline.retrace is None:
            return made
        return grown(request, Candidate(timeline, before.estimate))
    except Exception as error:  # noqa: BLE001 - the user's code runs here and may raise anything
        why = Reason(Why.FAILS, error=f"{type(error).__name__}: {error}")
        failed = Rejected(request.as_written.of(size), None, 0, why)
        return unchanged(request, before, batch_reasons(before), (failed,))


class _Best(NamedTuple):
    """The first option that fits."""

    key: Key
    option: Option
    candidate: Candidate
    group: _Group


def _proven(trial: _Trial) -> _Best | None:
    """The first option that fits; where the search is to be thorough, as traced, and with the nearest miss before it.

    A composed peak that is too low or too high is found so: then the search goes on, with what traces say.
    """
    checked = not trial.request.thorough
    while True:
        best = _cheapest(trial)
        if best is not None and trial.request.thorough and trial.is_composed(best.option):
            miss = trial.nearest_composed_miss(best.key)
            if not (checked or miss is None or trial.stands_for(best.option, miss[0])):
                trial.timelines.begin(miss[0], trial.size(miss[0]))
            trial.prove(best.option, best.group)
            continue
        miss = None if checked else trial.nearest_composed_miss(None if best is None else best.key)
        if miss is None or trial.is_confirmed(miss[0]):
            return best
        checked = trial.prove(*miss)


class _Composition(NamedTuple):
    """What an option's timeline is composed of: the same for all options with these kinds of blocks."""

    without: Option
    """The option with all blocks as written."""
    kinds: frozenset[str]
    """Names of a recipe's fields, each with a list of blocks, and of operators whose results are kept; "": blocks as
    written."""

    @classmethod
    def of(cls, option: Option, blocks: int) -> _Composition:
        """The way of an option of a model that has so many blocks."""
        kinds = {name: getattr(option.recipe, name) for name in ("checkpoint", "offload_activations")}
        without = option._replace(recipe=option.recipe.with_(**dict.fromkeys(kinds, ())))
        written = [""] if treated(option) < blocks else []
        lists = (f"{name} of {block.rpartition('.')[0]}" for name, names in kinds.items() for block in names)
        return cls(without, frozenset((*written, *lists, *option.recipe.checkpoint_keeps)))


def _same_memory(said: Timeline, traced: Timeline, size: int) -> bool:
    """True if two timelines take and give back the same, event by event, on the same streams.

    The order in which blocks are given back counts only where something is taken between them: free neighbours are
    joined in any order.
    """
    return all(
        one == other for one, other in zip_longest(_allocations(said, size), _allocations(traced, size), fillvalue=None)
    )


def _allocations(timeline: Timeline, size: int) -> Iterator[tuple[int, ...]]:
    """Each event: the bytes and the stream of what is taken, or the number of what is given back."""
    sizes = timeline.sizes(size)
    numbers: dict[int, int] = {}
    given_back: list[tuple[int, ...]] = []
    for event in timeline.events:
        if event >= 0:
            yield from sorted(given_back)
            given_back.clear()
            numbers[event] = len(numbers)
            yield sizes[event], timeline.blocks[event].stream
        else:
            given_back.append((numbers[~event],))
    yield from sorted(given_back)


def _in_order(trial: _Trial) -> list[tuple[Key, OptionFamily]]:
    """Every family with the place of its first member."""
    return sorted(((trial.key(f.option(f.lengths[0])), f) for f in trial.request.space.families()), key=_first)


def _cheapest(trial: _Trial) -> _Best | None:
    families = _in_order(trial)
    best: _Best | None = None
    for number, (place, family) in enumerate(families, 1):
        if best is not None and place >= best.key:
            break
        first = family.option(family.lengths[0])
        if not trial.affordable(first):
            continue
        if family.group not in trial.infeasible:
            words = first.words(trial.request.batch_size)
            trial.say(_("trying {number} of {count} ways: {words}", number=number, count=len(families), words=words))
        found = trial.smallest(family, None if best is None else best.key)
        if found is None:
            continue
        option = family.option(found[0])
        reached = trial.key(option)
        if best is None or reached < best.key:
            best = _Best(reached, option, found[1], family.group)
    return best


def _first(pair: tuple[Key, OptionFamily]) -> Key:
    return pair[0]


def _neighbours(trial: _Trial, best: _Best) -> Iterator[Rejected]:
    """What also fits: a way that costs less but changes more, and one that costs hardly more; no more traces for it."""
    cost = trial.costs.relative(best.option)
    behind = [family for place, family in _in_order(trial) if place > best.key and family.group != best.group]
    for least, most, why in (
        (0.0, cost, Why.CHEAPER_AND_MORE_CHANGES),
        (cost, cost * (1 + TOLERANCE), Why.HARDLY_DEARER),
    ):
        near = ((family, trial.between(family, least, most)) for family in behind)
        for family, options in islice(((family, options) for family, options in near if options), MOST_NEIGHBOURS):
            found = trial.first_known_to_fit(options)
            if found is not None:
                option, peak = found
                reason = Reason(why, peak=Amount(peak), time=RelativeTime(trial.costs.relative(option)))
                yield Rejected(option.of(trial.request.batch_size), peak, 0, reason)
                behind.remove(family)
                break


def _costlier(trial: _Trial, taken: Option, cost: float) -> list[Rejected]:
    """The simplest ways that were never tried, because they cost more than what was taken."""
    request, seen = trial.request, dict[Option, Rejected]()
    for family in request.space.families():
        option = family.option(family.lengths[0])
        words = recipe_words(option.recipe)
        simple = (option.precision != request.precision) + (option.splits > 1) + len(words) == 1
        if not simple or option == taken or family.group in trial.misses:
            continue
        price = trial.costs.relative(option)
        if price > cost:
            why = Reason(Why.COSTS_WITH_EVERY_BLOCK if family.prefix else Why.COSTS, time=RelativeTime(price))
            seen.setdefault(option, Rejected(option.of(request.batch_size), None, 0, why))
    return list(seen.values())
