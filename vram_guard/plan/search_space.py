"""Options, the space of them, the request that a search answers, and how an answer becomes a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from vram_guard.language import _
from vram_guard.plan.descriptions import recipe_words
from vram_guard.plan.learning_rate import learning_rate_factor
from vram_guard.plan.model import Plan, Rejected
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

if TYPE_CHECKING:
    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import Budget
    from vram_guard.timeline import Estimate, Timeline


class Option(NamedTuple):
    """One way to run a loaded batch."""

    precision: str
    splits: int
    """Micro-batches that a loaded batch is split into."""
    recipe: Recipe = AS_WRITTEN

    def words(self, batch_size: int) -> str:
        """The option as people read it."""
        batch = _("batch {count}", count=batch_size)
        if self.splits > 1:
            batch = _("{count} micro-batches of {size}", count=self.splits, size=batch_size // self.splits)
        return ", ".join([self.precision, batch, *recipe_words(self.recipe)])

    @property
    def changes_numbers(self) -> int:
        """How much the option changes the numbers of the training: 0 nothing, more is more.

        Checkpointing and offload compute what was computed before; micro-batches add up the same gradients in
        another order (and take batch normalisation's statistics over fewer samples); a fused optimizer rounds
        otherwise; mixed precision rounds activations; 8-bit states round the optimizer; half precision the weights.
        """
        return (
            (self.splits > 1)
            + 2 * (self.recipe.optimizer == "fused")
            + 4 * self.precision.endswith("-mixed")
            + 8 * (self.recipe.optimizer == "8bit")
            + 16 * (self.precision in ("16-true", "bf16-true"))
        )


class Timelines(Protocol):
    """Timelines of options."""

    def __call__(self, option: Option) -> Timeline:
        """The option's timeline over the micro-batch size, by the law that was found at small sizes."""
        ...

    def exact(self, option: Option, size: int) -> Timeline:
        """The option's timeline as traced at this very micro-batch size."""
        ...


class LowerBound(NamedTuple):
    """Bytes that an option takes at the very least."""

    size: int
    """Bytes."""
    of: str
    """What alone takes them."""


class Costs(Protocol):
    """What options cost, known without tracing each of them. Independent of any budget."""

    def relative(self, option: Option) -> float:
        """Step time under the option over the step time as written; a model."""
        ...

    def lower_bound(self, option: Option) -> LowerBound:
        """What the option takes at the very least."""
        ...


Method = Literal["checkpoint", "offload_activations", "both"]


class Chain(NamedTuple):
    """Longer and longer lists of blocks: the ``n``-th is the first ``n`` of ``blocks``."""

    method: Method
    blocks: tuple[str, ...]

    def recipe(self, base: Recipe, length: int) -> Recipe:
        """``base`` with the first ``length`` blocks treated by the method.

        "both": those blocks are offloaded and all others checkpointed.
        """
        first, rest = self.blocks[:length], self.blocks[length:]
        if self.method == "both":
            return base.with_(offload_activations=first, checkpoint=rest)
        return base.with_(**{self.method: (*getattr(base, self.method), *first)})

    @property
    def lengths(self) -> range:
        """The lengths that are not another chain's."""
        # "both" with every block offloaded is "offload_activations", with none "checkpoint".
        return range(1, len(self.blocks) + (self.method != "both"))


@dataclass(frozen=True)
class Space:
    """Every option that may be taken: all combinations of these, and the first lengths of each chain."""

    precisions: tuple[str, ...]
    splits: tuple[int, ...] = (1,)
    recipes: tuple[Recipe, ...] = (AS_WRITTEN,)
    chains: tuple[Chain, ...] = ()
    incompatible: Callable[[Option], str] = field(default=lambda _option: "", compare=False)
    """Why an option's parts do not go together ("" where they do)."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    def families(self) -> Iterator[Family]:
        """Every family whose parts go together."""
        for precision in self.precisions:
            for recipe in self.recipes:
                for chain in (None, *self.chains):
                    for splits in self.splits:
                        family = Family(precision, splits, recipe, chain)
                        if family.lengths and not self.incompatible(family.option(family.lengths[-1])):
                            yield family

    def __contains__(self, option: Option) -> bool:
        plain = option.precision in self.precisions and option.splits in self.splits
        return plain and option.recipe in self.recipes


class Family(NamedTuple):
    """Options that differ only in how many blocks of a chain are treated."""

    precision: str
    splits: int
    recipe: Recipe
    chain: Chain | None

    @property
    def lengths(self) -> range:
        """The numbers of blocks to choose from, ascending."""
        return range(1) if self.chain is None else self.chain.lengths

    def option(self, length: int) -> Option:
        """The option that treats this many blocks."""
        recipe = self.recipe if self.chain is None else self.chain.recipe(self.recipe, length)
        return Option(self.precision, self.splits, recipe)

    @property
    def group(self) -> tuple[str, Recipe, Chain | None]:
        """What families that differ only in their micro-batches have in common."""
        return self.precision, self.recipe, self.chain


@dataclass(frozen=True)
class Request:
    """What is asked of the search; sizes in samples, amounts in bytes."""

    batch_size: int
    precision: str
    budget: Budget
    space: Space
    reasons: tuple[str, ...] = ()
    """Why the precisions in the space are those."""
    accumulate: int = 1
    ranks: int = 1
    grow: bool = False
    target_utilization: float = 0.8
    lr_rule: str = "linear"
    dataset_size: int | None = None
    settings: AllocatorSettings | None = None
    host_usable: int | None = None
    """Bytes of host memory that techniques may take; None: not known, not limited."""
    correction: float = 1.0
    """What predicted peaks are multiplied by, at least 1: earlier runs took more than predicted."""

    @property
    def samples_per_batch(self) -> int:
        """Samples of an optimizer step for each sample of a loaded batch."""
        return self.accumulate * self.ranks

    @property
    def as_written(self) -> Option:
        """The step as its author wrote it."""
        return Option(self.precision, 1)

    def usable(self, estimate: Estimate) -> int:
        """Bytes that a prediction may take, with the margin of its tier."""
        return self.budget.for_tier(estimate.tier).usable

    def corrected(self, estimate: Estimate) -> int:
        """Bytes to hold against the budget."""
        return int(estimate.peak_reserved * self.correction)


class Candidate(NamedTuple):
    """An option, or a grown batch, with its prediction."""

    timeline: Timeline
    estimate: Estimate


def make_plan(
    request: Request,
    before: Candidate,
    after: Candidate,
    option: Option,
    batch_size: int,
    fits: bool,
    reasons: tuple[str, ...],
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
        learning_rate_factor=learning_rate_factor(request.lr_rule, effective_before, effective),
        fits=fits,
        estimate=after.estimate,
        before=before.estimate,
        budget=request.budget.for_tier(after.estimate.tier),
        reasons=reasons,
        rejected=rejected,
        recipe=option.recipe,
        slowdown=slowdown,
        correction=request.correction,
        timeline=after.timeline,
        timeline_before=before.timeline,
    )


def unchanged(
    request: Request, before: Candidate, reasons: tuple[str, ...], rejected: tuple[Rejected, ...] = ()
) -> Plan:
    """The step as written, which fits."""
    return make_plan(request, before, before, request.as_written, request.batch_size, True, reasons, rejected, 1.0)


def fits_reasons(before: Candidate) -> tuple[str, ...]:
    """Why nothing has to change."""
    return (_("The step fits as written."), *tier_reason(before.estimate))


def tier_reason(estimate: Estimate) -> tuple[str, ...]:
    """What has to be said of an answer that is not exact."""
    if estimate.tier == "partly symbolic":
        return (_("Some sizes are bounds, not exact: see the notes."),)
    return ()
