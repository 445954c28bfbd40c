"""Proof that an optimizer in another form, or on the host, updates weights as the one that was written.

What a step does to a weight depends on the weight, its gradient, its state and its group's settings, not on the model
around it. So small weights in the places of the model's are stepped in both ways, which costs nothing, however heavy
the model is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vram_guard.capture.optimizer_twin import optimizer_over
from vram_guard.language import _
from vram_guard.limits import SMALL_STEPS, STAND_IN_ELEMENTS, STAND_INS
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu, without_gpu
from vram_guard.techniques.optimizers import eight_bit_library, needs_closure
from vram_guard.techniques.placement import optimizer_for
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

#: Relative difference that rounding explains in double precision, in which sums are made in another order; some
#: operators work in single precision inside.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class SmallSteps:
    """What came of it."""

    difference: float = 0.0
    """The largest of a weight's updates, relative to the way that it has moved."""
    why_not: str = ""
    """The reason why nothing was run."""
    exact: bool = True
    """False where the form rounds its states on purpose."""

    @property
    def equal(self) -> bool:
        """True where both made the same updates."""
        return not self.why_not and self.difference <= TOLERANCE

    @property
    def refutation(self) -> str:
        """The difference in a sentence, where there must be none; "" where none was found."""
        if self.why_not or self.equal or not self.exact:
            return ""
        return _("{count} steps of small weights were run, and updates differed by {amount}", **self._figures())

    def words(self) -> str:
        """The outcome, for a reader of the plan."""
        if self.why_not:
            return _("the optimizer's other form was not run for a proof ({why})", why=self.why_not)
        if self.exact:
            return _(
                "the optimizer: {count} steps of small weights were run, and their updates are equal", count=SMALL_STEPS
            )
        return _(
            "8-bit states round: after {count} steps of small weights, updates differ by {amount}", **self._figures()
        )

    def _figures(self) -> dict[str, Any]:
        return {"count": SMALL_STEPS, "amount": f"{self.difference * 100:.2g}%"}


def small_steps(make: Callable[[], torch.optim.Optimizer], recipe: Recipe) -> SmallSteps | None:
    """Compare the optimizer with that of the recipe.

    Args:
        make: the optimizer as written, over whatever weights: only their shapes are read.
        recipe: whose optimizer is compared.

    Returns:
        None where the recipe leaves the optimizer as it is.
    """
    own = AS_WRITTEN.with_(optimizer=recipe.optimizer, optimizer_on_host=recipe.optimizer_on_host)
    if own == AS_WRITTEN:
        return None
    exact = recipe.optimizer != "8bit"
    if not exact and eight_bit_library() == "torchao":
        return SmallSteps(why_not=_("torchao compiles its 8-bit steps"), exact=False)
    try:
        found = _compared(make(), own, exact=exact)
    except Exception as error:  # noqa: BLE001 - the user's own optimizer runs in it
        return SmallSteps(why_not=f"{type(error).__name__}: {error}", exact=exact)
    return SmallSteps(found, exact=exact)


def _compared(optimizer: torch.optim.Optimizer, recipe: Recipe, *, exact: bool) -> float:
    if needs_closure(optimizer):
        raise TypeError(_("its step evaluates the loss itself"))
    began = _stand_ins(optimizer, torch.float64 if exact else torch.float32)
    steps = []
    for form in (AS_WRITTEN, recipe):
        weights = [[torch.nn.Parameter(one.clone()) for one in group] for group in began]
        with cpu_as_gpu(form), without_gpu():
            steps.append(_stepped(optimizer_for(optimizer_over(optimizer, weights), form), weights))
    moved = zip(*steps, [one for group in began for one in group], strict=True)
    return max((_relative(*weights) for weights in moved), default=0.0)


def _relative(one: torch.Tensor, other: torch.Tensor, first: torch.Tensor) -> float:
    """The difference of two weights against the way that one has moved; infinite where one is no number."""
    apart, way = (float(torch.linalg.vector_norm(one - beside)) for beside in (other, first))
    return apart / (way or 1.0) if math.isfinite(apart) else math.inf


def _stand_ins(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """By group: random numbers in the shapes of some of its weights, or of parts of them."""
    made, draws = [], torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        shapes: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for weight in group["params"]:
            if weight.requires_grad and len(shapes[weight.dim()]) < STAND_INS:
                shapes[weight.dim()].append(_smaller(tuple(weight.shape)))
        made.append([torch.randn(shape, dtype=dtype, generator=draws) for found in shapes.values() for shape in found])
    return made


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    while torch.Size(shape).numel() > STAND_IN_ELEMENTS:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], -(-shape[longest] // 2), *shape[longest + 1 :])
    return shape


def _stepped(optimizer: torch.optim.Optimizer, groups: Sequence[list[torch.nn.Parameter]]) -> list[torch.Tensor]:
    """The weights after some steps, whose gradients come out of a backward pass, as hooks of optimizers expect."""
    weights = [weight for group in groups for weight in group]
    draws = torch.Generator().manual_seed(1)
    for _step in range(SMALL_STEPS):
        for weight in weights:
            (weight * torch.randn(weight.shape, dtype=weight.dtype, generator=draws)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in weights]
