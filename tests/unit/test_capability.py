"""One trace serves every compute capability that answers it alike, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from vram_guard import Timeline, TrainingStep, trace
from vram_guard.budget import catalogue
from vram_guard.torch_release import torch_release

CAPABILITIES = sorted({gpu.compute_capability for gpu in catalogue()})


class Attending(nn.Module):
    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head
        self.inner, self.outer = nn.Linear(head, 3 * head), nn.Linear(head, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).view(len(x), -1, 1, 3 * self.head).transpose(1, 2).chunk(3, -1)
        return self.outer(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


def attending(head: int, precision: str) -> TrainingStep:
    batch = lambda size: torch.zeros(size, 16, head)  # noqa: E731
    return TrainingStep(Attending(head), batch, lambda m, x: m(x).sum(), torch.optim.SGD, precision=precision)


def of_every_capability(step: TrainingStep) -> dict[tuple[int, int], Timeline]:
    return {capability: trace(step, compute_capability=capability) for capability in CAPABILITIES}


#: No flash attention; flash; a larger workspace with flash; and from torch 2.5 on cuDNN's attention on two kinds.
HALF_CLASSES = 4 if torch_release() >= (2, 5) else 3

#: Of each step, the classes of the catalogue's capabilities that have one trace.
CLASSES = [
    (64, "32-true", 2),  # before Hopper and from Hopper on: the workspace of matrix products
    (62, "32-true", 3),  # and Ampere's memory-efficient attention wants rows of whole 16 bytes
    (64, "16-true", HALF_CLASSES),
    (200, "16-true", 3),
    (232, "16-true", 5),  # too wide for the backward pass on consumers' cards
]


@pytest.mark.parametrize(("head", "precision", "classes"), CLASSES)
def test_a_trace_is_taken_for_another_capability_only_where_a_trace_for_that_one_is_equal(head, precision, classes):
    made = of_every_capability(attending(head, precision))
    served = {one: [other for other in CAPABILITIES if made[one].of_capability(other)] for one in CAPABILITIES}
    for one, others in served.items():
        assert one in others
        for other in others:
            assert made[one].of_capability(other) == made[other]
    assert len({tuple(others) for others in served.values()}) == classes


class Asking(nn.Linear):
    """A model that asks torch about the card."""

    def __init__(self, ask: Any) -> None:
        super().__init__(8, 8)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2 if self.ask() else super().forward(x)


@each(
    ("ask", "classes"),
    [
        (lambda: False, 2),
        (lambda: torch.cuda.is_bf16_supported(), 2),  # if emulated
        (lambda: torch.cuda.is_bf16_supported(including_emulation=False), 3),
        (lambda: torch.cuda.get_device_capability() == (8, 6), len(CAPABILITIES)),
        (lambda: torch.cuda.get_device_properties(0).major == 8, len(CAPABILITIES)),
    ],
)
def test_what_a_model_asks_of_the_card_counts(ask, classes):
    batch = lambda size: torch.zeros(size, 8)  # noqa: E731
    built, late = (
        TrainingStep(model, batch, lambda m, x: m(x).sum(), torch.optim.SGD)
        for model in (Asking(ask), lambda: Asking(ask))
    )
    for step in (built, late):
        made = of_every_capability(step)
        assert len({tuple(filter(one.of_capability, CAPABILITIES)) for one in made.values()}) == classes
        assert made[8, 6] == (made[8, 0].of_capability((8, 6)) or made[8, 6])


def test_what_a_constructor_asks_counts_too():
    def build() -> nn.Module:
        return nn.Linear(8, 16 if torch.cuda.get_device_capability() >= (9, 0) else 8)

    step = TrainingStep(build, lambda size: torch.zeros(size, 8), lambda m, x: m(x).sum(), torch.optim.SGD)
    assert trace(step, compute_capability=(8, 0)).of_capability((8, 6)) is None


def test_without_a_law_nothing_is_taken_for_another_capability():
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return sum(model(row).sum() for row in x)  # as many operators as samples

    step = TrainingStep(nn.Linear(8, 8), lambda size: torch.zeros(size, 8), loss, torch.optim.SGD)
    timeline = trace(step)
    assert timeline.retrace is not None
    assert timeline.of_capability((8, 0)) is timeline
    assert timeline.of_capability((8, 6)) is None
