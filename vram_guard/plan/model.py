"""Plan: what to change so that the step fits, what that is predicted to take, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan._option import Option, OptionText
from vram_guard.plan.descriptions import (
    Reason,
    Why,
    loss_words,
    offload_words,
    optimizer_words,
    ranges,
    segments_words,
    sharding_words,
    slices_words,
)
from vram_guard.plan.descriptions import refused as refused_reason
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe
from vram_guard.timeline import named_phase
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vram_guard.budget import Budget
    from vram_guard.language import Message
    from vram_guard.plan.spread import Spread
    from vram_guard.timeline import Estimate, StretchName, Timeline


@dataclass(frozen=True)
class Rejected:
    """An option that was tried and not taken."""

    tried: OptionText | Message
    peak_reserved: int | None
    """Predicted bytes; None where they are not known: what it misses by is then the least that it can be."""
    missing: int
    """Bytes by which it misses the budget (or the target, for growth); 0 where bytes were not the reason."""
    reason: Reason

    @property
    def option(self) -> str:
        """In words: "bf16-mixed, 2 micro-batches of 16"."""
        return str(self.tried)

    @property
    def why(self) -> str:
        """The reason in words: "needs 30.00 GiB (6.00 GiB over budget)"."""
        return str(self.reason)

    @property
    def fits(self) -> bool:
        """True if it should fit as well: another one was preferred."""
        return self.reason.kind in (Why.CHEAPER_AND_MORE_CHANGES, Why.HARDLY_DEARER)

    def __str__(self) -> str:
        return _("{option}: {why}", option=self.option, why=self.why)


@dataclass(frozen=True)
class SmallerEvaluation:
    """An evaluation within a training whose loaders deliver smaller batches, and more of them."""

    phase: StretchName
    batch_size_before: int
    """Samples of its largest batch as written."""
    batch_size: int
    """A divisor of that; loaders of smaller batches are left as they are."""

    @property
    def name(self) -> str:
        """In the words of a report: "batch size of validation"."""
        return _("batch size of {phase}", phase=named_phase(self.phase))


@dataclass(frozen=True)
class CompiledStep:
    """A step that ``torch.compile`` compiles, beside the same step uncompiled."""

    eager: Estimate
    """The step as it would be without the compiler."""
    graphs: int = 0
    """Graphs that Inductor compiled, forward and backward; equal blocks share theirs."""
    breaks: tuple[str, ...] = ()
    """Why Dynamo ended a graph and went on in another."""
    why: str = ""
    """Why the compiled step was not followed, so that the plan's estimate is the eager one; "" where it was."""


@dataclass(frozen=True)
class Plan:
    """A way to run the training step within a budget. Where nothing fits, it is the step as written.

    Bytes are ints. A loaded batch of ``batch_size`` samples runs as ``batch_size // micro_batch_size``
    micro-batches, one after the other; gradients of ``accumulate`` micro-batches make one optimizer step.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> smaller = plan(step, 30000, "80MiB", allow=["accumulate"])
        >>> smaller.fits, smaller.micro_batch_size, smaller.accumulate, smaller.effective_batch_size
        (True, 15000, 2, 30000)
    """

    precision: str
    micro_batch_size: int
    accumulate: int
    """Micro-batches per optimizer step, the user's own accumulation included."""
    batch_size: int
    """Samples that the loader delivers at once: as given, or grown."""
    effective_batch_size: int
    """Samples per optimizer step over all processes, under this plan."""
    precision_before: str
    accumulate_before: int
    batch_size_before: int
    effective_batch_size_before: int
    learning_rate_factor: float
    """The factor for every learning rate; 1.0 while the effective batch size stays."""
    fits: bool
    estimate: Estimate
    """The predicted step under this plan, at ``micro_batch_size``."""
    before: Estimate
    """The predicted step as written, at the batch size that was asked for."""
    budget: Budget
    reason_values: tuple[Reason, ...]
    """The reasons for the plan, as kinds with figures."""
    rejected: tuple[Rejected, ...]
    recipe: Recipe = AS_WRITTEN
    """The techniques beyond precision and micro-batches."""
    slowdown: float | None = None
    """Step time over the step time as written, by the cost model; None: not modelled."""
    correction: float = 1.0
    """The factor that predicted peaks were multiplied by before they were compared with the budget."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """The timeline that ``estimate`` was read from, for plots and snapshots."""
    timeline_before: Timeline | None = field(default=None, repr=False, compare=False)
    spread: Spread | None = None
    """How the training lies on several GPUs, of which this is the plan of one; None: one GPU was planned for."""
    evaluation: SmallerEvaluation | None = None
    """Smaller batches of an evaluation; None: as written."""
    compiled: CompiledStep | None = None
    """What ``torch.compile`` makes of the step, whose ``estimate`` is then the compiled one; None: it is not used."""

    def __repr__(self) -> str:
        sizes = f"{self.precision}, {self.splits} x {self.micro_batch_size} samples"
        names = (one.name for one in fields(self.recipe))
        techniques = "".join(f", {name}" for name in names if getattr(self.recipe, name) != getattr(AS_WRITTEN, name))
        held = f"{format_bytes(self.peak)} of {format_bytes(self.budget.usable)}"
        return f"<Plan that {'fits' if self.fits else 'does not fit'}: {sizes}{techniques}; {held}>"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the plan, in the reader's language."""
        return tuple(map(str, self.reason_values))

    @property
    def fits_as_written(self) -> bool:
        """True if the step as its author wrote it fits, whatever was planned or pinned."""
        return self.before.fits(self.budget, self.correction)

    @property
    def only_pins_fail(self) -> bool:
        """True if the step fits as written, and nothing with the pinned settings does."""
        return self.fits_as_written and not self.fits

    @property
    def splits(self) -> int:
        """Micro-batches that one loaded batch is split into."""
        return self.batch_size // self.micro_batch_size

    @property
    def checkpointed_modules(self) -> tuple[str, ...]:
        """Modules that compute their forward again in the backward pass."""
        return self.recipe.checkpoint

    @property
    def offload(self) -> tuple[str, ...]:
        """A description of everything that is kept in host memory."""
        return tuple(offload_words(self.recipe))

    @property
    def peak(self) -> int:
        """Bytes that are compared with the budget: the predicted reserved peak, corrected."""
        return self.estimate.corrected(self.correction)

    @property
    def changed(self) -> bool:
        """True if the plan differs from the step as written."""
        return bool(self.changes())

    def changes(self) -> tuple[tuple[str, str, str], ...]:
        """Differences from the step as written: (name, before, after)."""
        cut = self.evaluation
        sizes = (
            *(() if self.spread is None else self.spread.changes()),
            (_("spread"), _("as written"), self._sharding() or _("as written")),
            (_("precision"), self.precision_before, self.precision),
            (_("batch size"), str(self.batch_size_before), str(self.batch_size)),
            (_("micro-batch size"), str(self.batch_size), str(self.micro_batch_size)),
            (_("micro-batches per optimizer step"), str(self.accumulate_before), str(self.accumulate)),
            (_("effective batch size"), str(self.effective_batch_size_before), str(self.effective_batch_size)),
            (_("learning rates"), "x 1", f"x {self.learning_rate_factor:g}"),
            (_("checkpointed modules"), _("none"), ranges(self.checkpointed_modules) or _("none")),
            (_("forward"), _("as written"), slices_words(self.recipe)),
            (_("on the host"), _("nothing"), _(", ").join(self.offload) or _("nothing")),
            (_("optimizer"), _("as written"), optimizer_words(self.recipe)),
            (_("loss"), _("as written"), loss_words(self.recipe)),
            (_("segments of the allocator"), _("as set"), segments_words(self.recipe)),
            *(() if cut is None else ((cut.name, str(cut.batch_size_before), str(cut.batch_size)),)),
        )
        return tuple(change for change in sizes if change[1] != change[2])

    def _sharding(self) -> str:
        return "" if self.recipe.sharding is None else sharding_words(self.recipe.sharding)

    @property
    def nearest_miss(self) -> Rejected | None:
        """The rejected option that came closest to the budget."""
        return nearest(self.rejected)

    @property
    def change_words(self) -> str:
        """The changes in a few words: "bf16-mixed, 2 micro-batches of 32"; where it is spread, those besides."""
        words = Option(self.precision, self.splits, self.recipe).words(self.batch_size, self.precision_before)
        if self.evaluation is None:
            return words
        cut = _("{name}: {words}", name=self.evaluation.name, words=self.evaluation.batch_size)
        return _(", ").join([words, cut]) if len(self.changes()) > 1 else cut

    def proposing(self, other: Plan, why: str) -> Plan:
        """This plan, whose reasons begin with another one that fits and is not applied.

        Args:
            other: which has micro-batches.
            why: they are not applied.
        """
        left = (one for one in self.reason_values if one != refused_reason("accumulate", why))
        proposed = Reason(Why.PROPOSED, change=other.change_words, why=why)
        return replace(self, reason_values=(proposed, *left))

    def verdict(self) -> str:
        """The verdict in a few words: "fits", the changes, or by how much the step exceeds the budget."""
        if self.fits and not self.changed:
            return _("fits")
        if self.fits:
            return self.change_words if self.spread is None else self.spread.words
        missing = self.peak - self.budget.usable
        if missing > 0:
            return _("{amount} over budget", amount=format_bytes(missing))
        if self.only_pins_fail:
            return _("fits as written, not as pinned")
        return _("not known to fit: only a lower bound")


def nearest(rejected: Iterable[Rejected]) -> Rejected | None:
    """The option that came closest to the budget; None where bytes were the reason for none of them.

    Of an option that was not traced no more is known than what it takes at least: one whose peak is known comes first.
    """
    missed = (option for option in rejected if option.missing > 0)
    return min(missed, key=lambda option: (option.peak_reserved is None, option.missing), default=None)
