"""The space of options, what a search asks of others, and the request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from vram_guard.budget.margins import NETWORKS, USUAL_TIER
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.techniques.recipe import AS_WRITTEN, Body, Recipe, Slices

if TYPE_CHECKING:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.timeline import Estimate, Timeline


class Timelines(Protocol):
    """Timelines of options."""

    def __call__(self, option: Option) -> Timeline:
        """The option's timeline over the micro-batch size, by the law that was found at small sizes."""
        ...

    def exact(self, option: Option, size: int) -> Timeline:
        """The option's timeline for this very micro-batch size, composed of those of others or traced."""
        ...

    def least(self, option: Option, size: int) -> int:
        """Bytes that the option allocates at the very least with this micro-batch size; 0: not known."""
        ...

    def composed(self, option: Option, size: int) -> bool:
        """True if what has been said of the option at this size is composed, and has not been traced."""
        ...

    def known(self, option: Option, size: int) -> bool:
        """True if :meth:`exact` needs no further trace."""
        ...

    def treats_equal_blocks(self, option: Option) -> bool:
        """True if the blocks that the option treats are equal to others of their list."""
        ...

    def distrust(self, option: Option) -> None:
        """Compose nothing any more of what this option was composed of: a trace says otherwise."""
        ...

    def direct(self, option: Option, size: int) -> Timeline:
        """The option's timeline as traced at this very micro-batch size."""
        ...

    def begin(self, option: Option, size: int) -> None:
        """That will be asked for: it may be traced beside what is asked for before."""
        ...

    def end(self) -> None:
        """Nothing that was begun is needed any more."""
        ...


class LowerBound(NamedTuple):
    """Bytes that an option takes at the very least."""

    size: int
    """Bytes."""
    why: Why
    """The part of the step that takes them alone: a reason with an ``amount``."""


class Costs(Protocol):
    """Costs of options, known without tracing each of them. Independent of any budget."""

    def relative(self, option: Option) -> float:
        """Step time under the option over the step time as written; a model."""
        ...

    def lower_bound(self, option: Option) -> LowerBound:
        """The least memory that the option can take."""
        ...


Method = Literal["checkpoint", "offload_activations", "both"]


class BlockPrefix(NamedTuple):
    """Longer and longer lists of blocks: the ``n``-th is the first ``n`` of ``blocks``."""

    method: Method
    blocks: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    """Operators whose results checkpointed blocks keep."""

    def recipe(self, base: Recipe, length: int) -> Recipe:
        """``base`` with the first ``length`` blocks treated by the method.

        "both": those blocks are offloaded and all others checkpointed.
        """
        first, rest = self.blocks[:length], self.blocks[length:]
        if self.method == "both":
            return base.with_(offload_activations=first, checkpoint=rest)
        treated = {self.method: (*getattr(base, self.method), *first)}
        return base.with_(**treated, checkpoint_keeps=self.keeps) if self.keeps else base.with_(**treated)

    @property
    def lengths(self) -> range:
        """The lengths that are not another prefix's."""
        # "both" with every block offloaded is "offload_activations", with none "checkpoint".
        return range(1, len(self.blocks) + (self.method != "both"))


class SlicePrefix(NamedTuple):
    """More and more slices of a body's batch that run again: the ``n``-th is the first ``n`` of ``total``."""

    body: Body
    total: int

    def recipe(self, base: Recipe, length: int) -> Recipe:
        """``base`` with the first ``length`` slices computed again."""
        return base.with_(slices=Slices(self.body, self.total, length))

    @property
    def lengths(self) -> range:
        """One slice that runs again, at least."""
        return range(1, self.total + 1)


@dataclass(frozen=True)
class Space:
    """Every option that may be taken: all combinations of these, and the first lengths of each prefix."""

    precisions: tuple[str, ...]
    splits: tuple[int, ...] = (1,)
    recipes: tuple[Recipe, ...] = (AS_WRITTEN,)
    prefixes: tuple[BlockPrefix | SlicePrefix, ...] = ()
    incompatible: Callable[[Option], str] = field(default=lambda _option: "", compare=False)
    """The reason why an option's parts cannot be combined ("" where they can)."""
    blocks: int = 0
    """Blocks that the model has, whether they may be treated or not."""

    def families(self) -> Iterator[OptionFamily]:
        """Every family whose parts go together."""
        for family in self._all():
            if not self._refusal(family):
                yield family

    @property
    def refusal(self) -> str:
        """Why no option is possible: the reason against the first one; "" where one is."""
        reasons = [self._refusal(family) for family in self._all()]
        return "" if "" in reasons else next(iter(reasons), "")

    def _all(self) -> Iterator[OptionFamily]:
        for precision, recipe, prefix, splits in product(
            self.precisions, self.recipes, (None, *self.prefixes), self.splits
        ):
            family = OptionFamily(precision, splits, recipe, prefix)
            if isinstance(prefix, SlicePrefix) and splits > 1:
                continue  # micro-batches keep as little, and compute nothing again
            if family.lengths:
                yield family

    def _refusal(self, family: OptionFamily) -> str:
        return self.incompatible(family.option(family.lengths[-1]))

    def __contains__(self, option: Option) -> bool:
        plain = option.precision in self.precisions and option.splits in self.splits
        return plain and option.recipe in self.recipes


class OptionFamily(NamedTuple):
    """Options that differ only in how many blocks of a prefix are treated."""

    precision: str
    splits: int
    recipe: Recipe
    prefix: BlockPrefix | SlicePrefix | None

    @property
    def lengths(self) -> range:
        """The numbers of blocks to choose from, ascending."""
        return range(1) if self.prefix is None else self.prefix.lengths

    def option(self, length: int) -> Option:
        """The option that treats this many blocks."""
        recipe = self.recipe if self.prefix is None else self.prefix.recipe(self.recipe, length)
        return Option(self.precision, self.splits, recipe)

    @property
    def group(self) -> tuple[str, Recipe, BlockPrefix | SlicePrefix | None]:
        """The key that families share which differ only in their micro-batches."""
        return self.precision, self.recipe, self.prefix


@dataclass(frozen=True)
class Request:
    """The question to the search; sizes in samples, amounts in bytes."""

    batch_size: int
    precision: str
    budget: Budget
    space: Space
    why_precision: Reason = field(default_factory=lambda: Reason(Why.NOT_ALLOWED))
    """The reason for the precisions in the space."""
    why_not_split: Reason = field(default_factory=lambda: Reason(Why.NO_ACCUMULATION))
    """The reason why there are no smaller micro-batches in the space, where there are none."""
    why_not_checkpointed: tuple[Reason, ...] = ()
    """The reasons why blocks are left out of those that may be checkpointed."""
    why_no_blocks: tuple[Reason, ...] = ()
    """The reason why no block is among those that may be checkpointed, where none is and they were asked for."""
    left_out: tuple[Reason, ...] = ()
    """The reasons why techniques that were asked for by name are not planned."""
    accumulate: int = 1
    ranks: int = 1
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    dataset_size: int | None = None
    settings: AllocatorSettings | None = None
    dearest: float | None = None
    """Options that cost more are not tried; None: all are."""
    host_usable: int | None = None
    """Bytes of host memory that techniques may take; None: not known, not limited."""
    thorough: bool = True
    """True: where timelines are composed, the option that is taken and the nearest miss are traced."""
    correction: float = 1.0
    """The factor for predicted peaks, at least 1: earlier runs took more than predicted."""

    def settings_under(self, recipe: Recipe) -> AllocatorSettings | None:
        """The allocator's settings for a training by this recipe."""
        if not recipe.expandable_segments:
            return self.settings
        from vram_guard.allocator import AllocatorSettings

        return replace(self.settings or AllocatorSettings(), expandable_segments=True)

    @property
    def samples_per_batch(self) -> int:
        """Samples of an optimizer step for each sample of a loaded batch."""
        return self.accumulate * self.ranks

    @property
    def as_written(self) -> Option:
        """The step as its author wrote it."""
        return Option(self.precision, 1)

    def usable(self, estimate: Estimate) -> int:
        """Bytes that a prediction may take, with its margin."""
        return self.budget.for_tier(estimate.tier, estimate.network).usable

    @property
    def most_usable(self) -> int:
        """Bytes that no prediction may exceed, whatever its margin."""
        kinds = (None, *NETWORKS)
        return max(self.budget.for_tier(USUAL_TIER, kind).usable for kind in kinds)

    def corrected(self, estimate: Estimate) -> int:
        """Bytes to hold against the budget."""
        return estimate.corrected(self.correction)

    def fits(self, estimate: Estimate) -> bool:
        """True if a prediction is known to stay within the budget."""
        return estimate.fits(self.budget, self.correction)


class Candidate(NamedTuple):
    """An option, or a grown batch, with its prediction."""

    timeline: Timeline
    estimate: Estimate


#: (option, whether at the very size that will run) -> its prediction.
Candidates = dict[tuple[Option, bool], Candidate]
