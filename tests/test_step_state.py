"""What a step advances itself, as a look before and after it sees it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - torch brings it

from vram_guard.proof.joined_samples import Calls, joined_by  # noqa: E402
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
    with Calls(()) as calls:
        model.part.weight.data.mul_(2)
    assert not list(state.written(()))
    assert list(state.written(calls.written)) == ["part.weight"]


def _looks(loss: Any, *, run: bool = False) -> str | None:
    def look(samples: int) -> Any:
        batch = torch.arange(3.0 * samples).view(samples, 3)
        calls = Calls(batch, samples)
        with calls:
            found = loss(batch, torch.ones(3, requires_grad=True))
        calls.returned(found)
        return calls.reaching()

    return joined_by(look(8), look(4), run=run)


def _rows(x: Any) -> Any:
    return torch.arange(len(x))


def _shifted_in_place(x: Any, w: Any) -> Any:
    x[1:] += 0.1 * x[:-1]
    return (x * w).mean()


def _written_by_sample(x: Any, w: Any) -> Any:
    x[:, 0] += 1
    return (x * w).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (_shifted_in_place, "__getitem__"),
        (_written_by_sample, ""),
        (lambda x, w: (x * w).mean(), ""),
        (lambda x, w: ((x - x.mean(1, keepdim=True)) * w).mean(), ""),
        (lambda x, w: ((x - x.mean(0)) * w).mean(), "mean"),
        (lambda x, w: ((x.cumsum(0)) * w).mean(), "cumsum"),
        (lambda x, w: ((x.cumsum(1)) * w).mean(), ""),
        (lambda x, w: (x * w).mean() * float(x.sum()), "mul"),
        (lambda x, w: (x * w).mean() + 0 * len(x), ""),
        (lambda x, w: (x * w).sum() / len(x), ""),
        (lambda x, w: ((x + len(x)) * w).mean(), "add"),
        (lambda x, w: (x[torch.randperm(len(x))] * w).mean(), "__getitem__"),
        (lambda x, w: (x[list(range(len(x)))[::-1]] * w).mean(), "__getitem__"),
        (lambda x, w: (x[_rows(x), 0] * w[0]).mean(), ""),
        (lambda x, w: (x[_rows(x).flip(0), 0] * w[0]).mean(), "__getitem__"),
        (lambda x, w: (x[_rows(x)[:, None], 0] * w[0]).mean(), ""),
        (lambda x, w: ((x + _rows(x)[:, None]) * w).mean(), "arange"),
        (lambda x, w: ((x + _rows(x).float()[:, None]) * w).mean(), "arange"),
        (lambda x, w: ((x * torch.linspace(0, 1, len(x))[:, None]) * w).mean(), "linspace"),
        (lambda x, w: ((x + torch.tensor([[n] for n in range(len(x))])) * w).mean(), "tensor"),
        (lambda x, w: ((x + torch.arange(3)) * w).mean(), ""),
        (lambda x, w: (x.gather(1, (_rows(x) * 0)[:, None]) * w).mean(), ""),
        (lambda x, w: (x[..., torch.tensor([2, 1, 0])] * w).mean(), ""),
        (lambda x, w: (x[x[:, 0] > 0] * w).mean(), ""),
        (lambda x, w: (x.index_select(0, torch.randperm(len(x))) * w).mean(), "index_select"),
        (lambda x, w: ((x.chunk(2)[0] + x.chunk(2)[1]) * w).mean(), "chunk"),
        (lambda x, w: (torch.cat([x, x]).chunk(2)[0] * w).mean(), ""),
        (lambda x, w: ((x * torch.full((len(x), 1), 3.0)) * w).mean(), ""),
        (lambda x, w: ((x * torch.full((1, 3), float(len(x)))) * w).mean(), "full"),
        (lambda x, w: ((x * torch.tensor([[1.0]] * len(x))) * w).mean(), ""),
        (lambda x, w: (x * w).mean() + 0 * sum(float(one) for one in x[:, 0]), ""),
        (lambda x, w: sum((row * w).sum() for row in x), None),
        (lambda x, w: (torch.stack(list(x)) * w).mean(), None),
    ],
)
def test_what_has_no_graph_and_joins_samples_is_named(loss: Any, expected: str | None) -> None:
    assert _looks(loss) == expected


def test_a_list_of_samples_is_as_one() -> None:
    def look(samples: int) -> Any:
        batch = [torch.ones(3) for _ in range(samples)]
        calls = Calls(batch, samples)
        with calls:
            loss = (torch.stack(batch) * torch.ones(3, requires_grad=True)).mean()
        calls.returned(loss)
        return calls.reaching()

    assert joined_by(look(8), look(4)) == ""


def test_what_the_length_of_a_batch_does_is_left_to_a_run() -> None:
    def loss(x: Any, w: Any) -> Any:
        return ((x * w).sum(1) / len(x)).sum()

    assert (_looks(loss), _looks(loss, run=True)) == ("div", "")
