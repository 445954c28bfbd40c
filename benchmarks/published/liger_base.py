"""Operators as Liger-Kernel's benchmarks run them: with their inputs, gradients and twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Operator(nn.Module):
    """One operator with its inputs; a parameter is an input that wants a gradient, a buffer is one that does not."""

    keeps_graph = True
    """The benchmark asks backward to retain the graph."""

    def wants(self, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        """An input that wants a gradient."""
        return nn.Parameter(torch.empty(*shape, dtype=dtype))

    def hold(self, name: str, tensor: Tensor) -> None:
        """An input that wants none."""
        self.register_buffer(name, tensor)

    def gradient(self, output: Tensor) -> Tensor | None:
        """The gradient that backward starts from; None: the output is a scalar."""
        return torch.randn_like(output)

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """One backward pass."""
        output.backward(gradient, retain_graph=self.keeps_graph)


class WithGradient(Operator):
    """An operator whose incoming gradient is made once, beside the input ``x``."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.x = self.wants(*shape, dtype=dtype)
        self.hold("dy", torch.empty(*shape, dtype=dtype))

    def gradient(self, output: Tensor) -> Tensor:  # noqa: ARG002
        return self.dy


class Loss(Operator):
    """An operator with a scalar result; its graph dies with the backward pass."""

    keeps_graph = False

    def gradient(self, output: Tensor) -> None:  # noqa: ARG002
        return None
