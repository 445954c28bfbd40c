"""The symbolic answer next to a closed form, in words and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.report._content import TIER_NAMES, range_facts
from vram_guard.report.as_json import as_dict
from vram_guard.report.calculator import amount
from vram_guard.report.categories import category_name
from vram_guard.timeline import Estimate, phase_and_step


@dataclass(frozen=True)
class SymbolicAnswer:
    """The memory that the step of this very model takes."""

    estimate: Estimate
    budget: Budget | None
    """None: the amount is unknown."""
    largest_batch: int | None
    """None without a budget."""
    plan: Plan | None = None
    """The plan, where one was asked for."""

    @property
    def fits(self) -> bool:
        """True where the step is known to stay within the budget."""
        return self.budget is not None and self.estimate.fits(self.budget)


def symbolic_lines(answer: SymbolicAnswer, *, verbose: bool = True) -> Iterator[str]:
    """The answer, line by line; verbose: with the parts of the peak and the releases."""
    estimate, peak = answer.estimate, answer.estimate.peak_reserved
    head = _("🔬 symbolic: the step of this very model, replayed through PyTorch's allocator")
    yield head if estimate.tier == "symbolic" else f"{head} ({_(TIER_NAMES[estimate.tier])})"
    yield _("   - peak reserved: {peak}", peak=amount(peak))
    for name in ("parameters", "gradients", "optimizer_states", "activations", "batch", "temporaries", "workspace"):
        held = estimate.breakdown.get(name, 0)
        if held and verbose:
            yield "     " + _("{name}: {words}", name=category_name(name), words=amount(held))
    if estimate.releases is not None and verbose:
        yield _("   - releases: {releases}", releases=estimate.releases)
    for phase in estimate.phases:
        yield "   - " + _("{name}: {words}", name=phase_and_step(phase), words=amount(phase.peak_reserved))
    for name, words in range_facts(estimate):
        yield "   - " + _("{name}: {words}", name=name, words=words)
    if answer.budget is None:
        return
    usable = answer.budget.for_tier(estimate.tier, estimate.network).usable
    share = f"{abs(usable - peak) / usable:.1%}" if usable else "-"
    if answer.fits:
        yield _("   ✅ fits; to spare: {amount} ({share})", amount=amount(usable - peak), share=share)
    elif peak > usable:
        yield _("   ❌ does not fit; too much: {amount} ({share})", amount=amount(peak - usable), share=share)
    else:
        yield _("   ❓ not known to fit: the number is a lower bound")
    yield _("   - usable: {amount}", amount=amount(usable))
    if answer.largest_batch is not None:
        yield _("   - largest batch: {count}", count=answer.largest_batch)


def symbolic_dict(answer: SymbolicAnswer) -> dict[str, Any]:
    """The answer for programs, without its plan; amounts are ints of bytes."""
    return {**as_dict(answer.estimate, budget=answer.budget), "largest_batch": answer.largest_batch}
