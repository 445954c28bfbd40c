"""What a step advances itself, as a look before and after it sees it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - torch brings it

from vram_guard.proof.samples_apart import SamplesApart  # noqa: E402
from vram_guard.proof.step_state import StepState  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, meter: Any = None) -> None:
        super().__init__()
        self.part = torch.nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.counts = np.zeros(2)
        self.meter = meter


def _changed(model: Model, step: Any) -> list[str]:
    state = StepState(model, step)
    step(model)
    return sorted({name for name, _shape in state.changed()} | set(state.written(())))


def _nothing(model: Model) -> None:
    model.part(torch.ones(1, 3)).sum()


def _array(model: Model) -> None:
    model.counts[0] += 1


def _in_place(model: Model) -> None:
    model.seen.add_(1)


def _attribute(model: Model) -> None:
    model.queue = 3


@pytest.mark.parametrize(
    ("step", "expected"), [(_nothing, []), (_array, ["counts"]), (_in_place, ["seen"]), (_attribute, ["queue"])]
)
def test_what_a_step_changes_is_named(step: Any, expected: list[str]) -> None:
    assert _changed(Model(), step) == expected


@pytest.mark.parametrize(("home", "expected"), [(__name__, ["meter.total"]), ("pytest", []), ("torchmetrics.x", [])])
def test_objects_of_installed_packages_are_theirs(home: str, expected: list[str]) -> None:
    """Tables that a library fills as it likes are no state of the training."""
    meter = type("Meter", (), {"__module__": home})()
    meter.total = 0

    def step(model: Model) -> None:
        model.meter.total += 1

    assert _changed(Model(meter), step) == expected


def test_a_write_past_autograd_is_seen_by_its_memory() -> None:
    model = Model()
    state = StepState(model, _nothing)
    with SamplesApart((), 2, None) as calls:
        model.part.weight.data.mul_(2)
    assert not list(state.written(()))
    assert list(state.written(calls.written)) == ["part.weight"]
