"""``torch.inference_mode`` in a step: no gradients, no copies of weights kept by autocast, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep
from vram_guard.simulate import trace_at


class Net(nn.Module):
    """Composite operators, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.linear(nn.functional.linear(rows, self.weight), self.weight)
        return torch.where(rows > 0, rows, float("-inf")).softmax(-1)


def requests(region, precision="32-true"):
    def forward(model, rows):
        with region():
            model(rows)

    step = TrainingStep(Net, lambda size: torch.zeros(size, 7, 64), forward, None, precision)
    timeline = trace_at(step, 4)
    sizes = timeline.sizes(4)
    return [(sizes[event], timeline.blocks[event].operator) for event in timeline.events if event >= 0]


def test_composite_operators_are_taken_apart():
    assert requests(torch.inference_mode) == requests(torch.no_grad)


def casts(found):
    return sum(size == 64 * 64 * 2 for size, _ in found)


def test_autocast_keeps_no_copies_of_weights():
    both_steps = 2
    assert casts(requests(torch.no_grad, "bf16-mixed")) == both_steps
    assert casts(requests(torch.inference_mode, "bf16-mixed")) == 2 * both_steps


def test_leaving_it_brings_gradients_back():
    seen = []

    @torch.inference_mode()
    def inner() -> None:
        seen.append(torch.is_grad_enabled())
        with torch.inference_mode(mode=False):
            seen.append(torch.is_grad_enabled())
        seen.append(torch.is_grad_enabled())
        raise KeyError

    def loss(model, rows):
        with pytest.raises(KeyError):
            inner()
        seen.append(torch.is_grad_enabled())
        return model(rows).sum()

    entered = torch.inference_mode.__enter__
    trace_at(TrainingStep(Net, lambda size: torch.zeros(size, 7, 64), loss, torch.optim.SGD), 4)
    assert seen == [False, True, False, True] * 2
    assert torch.inference_mode.__enter__ is entered
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()
