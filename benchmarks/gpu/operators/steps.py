"""A training step whose model is one operator, applied to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vram_guard import TrainingStep
from vram_guard.step import Precision

#: A constant operand: made on the CPU, a buffer of the model.
Constant = Callable[[], Tensor]


@dataclass(frozen=True)
class Operator:
    """One operator, forward, backward and the update of its operands.

    Attributes:
        name: unique; its first word is the family, which is measured in one process.
        build: makes a model whose ``forward`` takes nothing and returns a tensor or a tuple that begins with one.
        precision: as in TrainingStep.
        optimizer: makes the optimizer; stochastic gradient descent where the optimizer is not what is looked at.
    """

    name: str
    build: Callable[[], nn.Module]
    precision: Precision = "32-true"
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=1e-6)

    @property
    def family(self) -> str:
        """The first word of the name."""
        return self.name.partition(" ")[0]

    def step(self) -> TrainingStep:
        """The step itself, for the GPU and for the prediction alike. Its batch is one number that nobody reads."""
        return TrainingStep(
            model=self.build,
            batch=lambda size: {"x": torch.zeros(size)},
            loss=_summed,
            optimizer=self.optimizer,
            precision=self.precision,
        )


def _summed(model: nn.Module, _batch: Mapping[str, Tensor]) -> Tensor:
    found = model()
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return (first.abs() if first.is_complex() else first).sum()


class _Applied(nn.Module):
    """A function of the model's parameters and constants."""

    def __init__(
        self,
        function: Callable[..., Any],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        constants: Mapping[str, Constant],
    ) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(*shape).to(dtype)) for shape in shapes)
        self.constants = tuple(constants)
        for name, make in constants.items():
            self.register_buffer(name, make())

    def forward(self) -> Any:
        return self.function(*self.operands, **{name: getattr(self, name) for name in self.constants})


class _Called(nn.Module):
    """A module of torch.nn and its operands, which are parameters."""

    def __init__(self, module: nn.Module, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(*shape).to(dtype)) for shape in shapes)
        self.to(dtype)

    def forward(self) -> Any:
        return self.module(*self.operands)


def applied(
    function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32, **constants: Constant
) -> Callable[[], nn.Module]:
    """The model of a function, for :class:`Operator`."""
    return lambda: _Applied(function, shapes, dtype, constants)


def called(
    make: Callable[[], nn.Module], *shapes: Sequence[int], dtype: torch.dtype = torch.float32
) -> Callable[[], nn.Module]:
    """The model of a module of torch.nn, for :class:`Operator`."""
    return lambda: _Called(make(), shapes, dtype)
