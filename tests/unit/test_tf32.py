"""Torch's switches for TF32, old and new: what a trace takes from them, and that it leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from vram_guard import TrainingStep, trace
from vram_guard.simulate.device.tf32 import SWITCHES, allows_tf32, precision_switches

pytestmark = pytest.mark.torch_since(2, 9)  # the new switches


def read() -> list[object]:
    """Every switch; None where torch does not tell."""
    return [_value(getter) for getter, _setter in precision_switches()]


def _value(getter: Callable[[], object]) -> object:
    try:
        return getter()
    except RuntimeError:
        return None


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """The switches of a new process, whatever an earlier test did, and every one set back at the end.

    Torch's old switches leave "ieee" in the new ones, which then no longer follow those above them.
    """
    before = read()
    torch.set_float32_matmul_precision("highest")
    for backend, operator in SWITCHES:
        default = "tf32" if (backend, operator) in (("cuda", "conv"), ("cuda", "rnn")) else "none"
        torch._C._set_fp32_precision_setter(backend, operator, default)
    yield
    for (_getter, setter), value in zip(precision_switches(), before, strict=True):
        setter(value)
    assert read()[2:] == before[2:]


class Network(nn.Module):
    """A convolution and a product, in float32."""

    def __init__(self, sets: str = "") -> None:
        super().__init__()
        self.convolution, self.linear, self.sets = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), sets

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.sets:
            torch.set_float32_matmul_precision(self.sets)
        return self.linear(self.convolution(images).mean((2, 3)))


def units(sets: str = "") -> dict[str, str]:
    """What works on the convolution and on the product."""
    step = TrainingStep(
        model=lambda: Network(sets),
        batch=lambda size: torch.randn(size, 3, 8, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    work = trace(step, compute_capability=(9, 0)).work
    found = {one.operator.split(".")[1]: one.unit for one in work if one.phase == "forward" and one.unit != "vector"}
    return {name: found[name] for name in ("convolution", "addmm")}


def test_the_defaults() -> None:
    before = read()
    assert units() == {"convolution": "tf32", "addmm": "fp32"}
    assert read() == before


@pytest.mark.parametrize(
    ("backend", "operator", "value", "expected"),
    [
        ("cuda", "matmul", "tf32", {"convolution": "tf32", "addmm": "tf32"}),
        ("generic", "all", "tf32", {"convolution": "tf32", "addmm": "tf32"}),
        ("cuda", "conv", "ieee", {"convolution": "fp32", "addmm": "fp32"}),
        ("cuda", "matmul", "ieee", {"convolution": "tf32", "addmm": "fp32"}),
    ],
)
def test_the_new_switches_are_followed_and_left_alone(backend, operator, value, expected) -> None:
    torch._C._set_fp32_precision_setter(backend, operator, value)
    before = read()
    assert units() == expected
    assert read() == before


def test_a_step_that_sets_a_switch_does_so_for_the_trace_alone() -> None:
    before = read()
    assert units(sets="high")["addmm"] == "tf32"
    assert read() == before


def test_new_switches_beside_old_ones_are_followed() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_tf32 = False
    before = read()
    assert units()["addmm"] == "fp32"
    assert read() == before
    assert (allows_tf32("matmul"), allows_tf32("conv"), allows_tf32("rnn")) == (False, True, True)
