"""Real out-of-memory errors, raised where a test wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class BreaksAtOperator(TorchDispatchMode):
    """Out of memory at operator number ``at`` (from 0) inside the block; at the end of it, where there are fewer."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise no_memory()
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            raise no_memory()


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
