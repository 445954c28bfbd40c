"""The optimizer in the backward pass: each parameter steps when its gradient is complete, and the gradient dies there.

So no more than the gradients of a few parameters are there at once. The optimizer object, its groups, states, hooks and
schedulers stay what they are; its ``step`` finds no gradients left, and has nothing to do but what it is wrapped in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.techniques._recomputed import check_recomputations
from vram_guard.techniques.compatibility import EACH_BY_ITSELF


def step_in_backward(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """Let these optimizers step in the backward pass from now on.

    It is the same training only where a backward pass is a step, and where nothing looks at a gradient or changes it
    between the two: no accumulation, no clipping, no GradScaler.

    Args:
        optimizers: of torch's own classes in :data:`EACH_BY_ITSELF`, or 8-bit forms of them.

    Returns:
        A function after which they step as before.

    Raises:
        UnsupportedTechniqueError: another optimizer, or one whose steps have hooks of their own; nothing was changed.
    """
    optimizers = list(optimizers)
    for optimizer in optimizers:
        reason = cannot_step_in_backward(optimizer)
        if reason:
            raise UnsupportedTechniqueError(reason)
    handles = [
        parameter.register_post_accumulate_grad_hook(_ParameterStep(optimizer, group))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def cannot_step_in_backward(optimizer: torch.optim.Optimizer) -> str:
    """The reason why this optimizer cannot step parameter by parameter; "" if it can."""
    kind = type(optimizer)
    name = kind.__name__.removesuffix("8bit")
    own = getattr(torch.optim, kind.__name__, None) is kind
    eight_bit = kind.__module__.partition(".")[0] in ("bitsandbytes", "torchao") and kind.__name__ != name
    if name not in EACH_BY_ITSELF or not (own or eight_bit):
        return not_by_itself(kind.__name__)
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        return _("{name} has hooks around its step, which would run after it", name=kind.__name__)
    return ""


def not_by_itself(name: str) -> str:
    """The reason against it for an optimizer of this name."""
    return _(
        "{name} cannot step in the backward pass; torch's own {known} can", name=name, known=", ".join(EACH_BY_ITSELF)
    )


class _ParameterStep:
    """A hook of one parameter: the optimizer's own step, of which it sees this parameter alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        step: Any = type(optimizer).step
        # Without what torch wraps around it: hooks of the step run once, when the loop asks for it.
        self._step = getattr(step, "__wrapped__", step)

    def __call__(self, parameter: torch.Tensor) -> None:
        check_recomputations()
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**self._group, "params": [parameter]}]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
