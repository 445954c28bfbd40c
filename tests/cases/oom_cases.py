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
