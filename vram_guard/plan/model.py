"""Plan: what to change so that the step fits, what that is predicted to take, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.plan.descriptions import offload_words, optimizer_words, ranges
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.timeline import Estimate, Timeline


@dataclass(frozen=True)
class Rejected:
    """An option that was tried and not taken."""

    option: str
    """In words: "bf16-mixed, 2 micro-batches of 16"."""
    peak_reserved: int | None
    """Predicted bytes; None where the option could not be traced."""
    missing: int
    """Bytes by which it misses the budget (or the target, for growth); 0 where bytes were not the reason."""
    why: str


@dataclass(frozen=True)
class Plan:
    """How to run the training step within a budget. Where nothing fits, it is the step as written.

    Bytes are ints. A loaded batch of ``batch_size`` samples runs as ``batch_size // micro_batch_size``
    micro-batches, one after the other; gradients of ``accumulate`` micro-batches make one optimizer step.
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
    """What every learning rate has to be multiplied by; 1.0 while the effective batch size stays."""
    fits: bool
    estimate: Estimate
    """The predicted step under this plan, at ``micro_batch_size``."""
    before: Estimate
    """The predicted step as written, at the batch size that was asked for."""
    budget: Budget
    reasons: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    recipe: Recipe = AS_WRITTEN
    """The techniques beyond precision and micro-batches."""
    slowdown: float | None = None
    """Step time over the step time as written, by the cost model; None: not modelled."""
    correction: float = 1.0
    """What predicted peaks were multiplied by before they were held against the budget."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """What ``estimate`` was read from, for plots and snapshots."""
    timeline_before: Timeline | None = field(default=None, repr=False, compare=False)

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
        """What waits in host memory, in words."""
        return tuple(offload_words(self.recipe))

    @property
    def peak(self) -> int:
        """Bytes that are held against the budget: the predicted reserved peak, corrected."""
        return int(self.estimate.peak_reserved * self.correction)

    @property
    def fits_as_written(self) -> bool:
        """Whether the step as the user wrote it fits the budget, whatever was pinned."""
        peak = int(self.before.peak_reserved * self.correction)
        return self.before.tier != "formula" and peak <= self.budget.for_tier(self.before.tier).usable

    @property
    def changed(self) -> bool:
        """Whether the plan differs from the step as written."""
        return bool(self.changes())

    def changes(self) -> tuple[tuple[str, str, str], ...]:
        """What differs from the step as written: (name, before, after)."""
        sizes = (
            (_("precision"), self.precision_before, self.precision),
            (_("batch size"), str(self.batch_size_before), str(self.batch_size)),
            (_("micro-batch size"), str(self.batch_size), str(self.micro_batch_size)),
            (_("micro-batches per optimizer step"), str(self.accumulate_before), str(self.accumulate)),
            (_("effective batch size"), str(self.effective_batch_size_before), str(self.effective_batch_size)),
            (_("learning rates"), "x 1", f"x {self.learning_rate_factor:g}"),
            (_("checkpointed modules"), _("none"), ranges(self.checkpointed_modules) or _("none")),
            (_("on the host"), _("nothing"), ", ".join(self.offload) or _("nothing")),
            (_("optimizer"), _("as written"), optimizer_words(self.recipe)),
        )
        return tuple(change for change in sizes if change[1] != change[2])

    @property
    def nearest_miss(self) -> Rejected | None:
        """The rejected option that came closest to the budget."""
        missed = [option for option in self.rejected if option.missing > 0]
        return min(missed, key=lambda option: option.missing, default=None)

    def explain(self) -> str:
        """The plan in plain words, several lines: verdict, changes, reasons, what was rejected."""
        lines = [self._verdict(), ""]
        lines += [f"  {name}: {before} -> {after}" for name, before, after in self.changes()] or [
            "  " + _("nothing changes")
        ]
        if self.slowdown is not None and self.changed:
            lines.append("  " + _("step time, modelled: x {factor}", factor=f"{self.slowdown:.2f}"))
        lines += ["", _("Why:"), *(f"  - {reason}" for reason in self.reasons)]
        if self.rejected:
            lines += ["", _("Not taken:"), *self._not_taken()]
        return "\n".join(lines)

    def _not_taken(self) -> list[str]:
        """One line for each reason, with the first option that it kept out."""
        kept_out: dict[str, list[str]] = {}
        for option in self.rejected:
            kept_out.setdefault(option.why, []).append(option.option)
        lines = []
        for why, (first, *more) in kept_out.items():
            which = _("{option} (and {count} more)", option=first, count=len(more)) if more else first
            lines.append(f"  - {which}: {why}")
        return lines

    def _verdict(self) -> str:
        peak, usable = format_bytes(self.peak), format_bytes(self.budget.usable)
        if self.fits:
            spare = format_bytes(self.budget.usable - self.peak)
            return _("Fits: {peak} of {usable}, {spare} to spare.", peak=peak, usable=usable, spare=spare)
        if self.peak > self.budget.usable:
            return _("Does not fit: {peak} needed, {usable} usable.", peak=peak, usable=usable)
        return _("Not known to fit: at least {peak} needed, {usable} usable.", peak=peak, usable=usable)
