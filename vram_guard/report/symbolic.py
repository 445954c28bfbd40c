"""The symbolic answer next to a closed form, in words and for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.report.as_json import as_dict
from vram_guard.report.text import render
from vram_guard.terminal import terminal_width
from vram_guard.timeline import Estimate


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
    """The answer, line by line; verbose: the whole report."""
    yield _("🔬 symbolic: the step of this very model, replayed through PyTorch's allocator")
    width = terminal_width(sys.stdout)
    yield from render(answer.estimate, budget=answer.budget, width=width, verbose=verbose).splitlines()
    if answer.largest_batch is not None:
        yield _("   - largest batch: {count}", count=answer.largest_batch)


def symbolic_dict(answer: SymbolicAnswer) -> dict[str, Any]:
    """The answer for programs, without its plan; amounts are ints of bytes."""
    return {**as_dict(answer.estimate, budget=answer.budget), "largest_batch": answer.largest_batch}
