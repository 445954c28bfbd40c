"""Real out-of-memory errors, raised where a test wants them."""

from __future__ import annotations

from typing import Any

import torch

#: As PyTorch 2.13 words it.
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.55 GiB of which 1.2 GiB is free."
)


def no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(TEXT)


class _BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ctx.error


def breaks_in_backward(tensor: torch.Tensor, error: Exception | None = None) -> torch.Tensor:
    """The tensor itself; its gradient cannot be computed."""
    return _BreaksInBackward.apply(tensor, error or no_memory())


class BreakingAdamW(torch.optim.AdamW):
    """Breaks in its step number ``at`` (from 0), ``times`` times: before it changes anything, or half-way.

    Only once ``armed``: while a step is predicted, it works.
    """

    armed = False

    def __init__(self, *args: Any, at: int = -1, half_way: bool = False, times: int = 1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.at, self.half_way, self.times, self.steps = at, half_way, times, 0

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        made = super()._init_group(group, *lists, **named)
        last = group is self.param_groups[-1]
        if self.armed and self.steps == self.at and self.times > 0 and (last or not self.half_way):
            self.times -= 1
            raise no_memory()
        return made

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps += 1
        return result
