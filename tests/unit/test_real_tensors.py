"""Real tensors that a traced step writes to hold afterwards what they held before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import TrainingStep


def by_element(table: Tensor) -> None:
    """Two views of the same memory, the second one written when the first has changed it."""
    table[0] = 3.0
    table[:2] += 1.0


def by_indices(table: Tensor) -> None:
    table[torch.tensor([1, 2])] = 5.0


def by_mask(table: Tensor) -> None:
    table[table == 0] = 7.0


def scattered(table: Tensor) -> None:
    table.masked_scatter_(torch.tensor([True, False, True, False]), torch.ones(4))


def added(table: Tensor) -> None:
    table.add_(1.0)


def many_at_once(table: Tensor) -> None:
    torch._foreach_add_([table, table[1:]], 2.0)


@pytest.mark.parametrize("write", [by_element, by_indices, by_mask, scattered, added, many_at_once])
@pytest.mark.parametrize("of_model", [True, False])
def test_what_a_step_writes_is_put_back(write: Callable[[Tensor], None], of_model: bool) -> None:
    table = torch.arange(4.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = table if of_model else None

        def forward(self, x: Tensor) -> Tensor:
            write(table)
            return self.linear(x)

    step = TrainingStep(
        model=Net,
        batch=lambda size: torch.randn(size, 4),
        loss=lambda model, x: model(x).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    run_step(step, 2, (8, 0))
    assert table.tolist() == [0, 1, 2, 3]
