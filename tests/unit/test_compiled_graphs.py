"""Trainings whose code torch compiles: what is compiled later is compared with what the first batch ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from each import each
from torch import nn
from torch.nn import functional as F

from vram_guard import TrainingStep
from vram_guard.errors import LossChangedError, UnsupportedTechniqueError
from vram_guard.proof.bodies import find_body
from vram_guard.techniques import Body, Recipe, Slices, install
from vram_guard.techniques.loss_graphs import LossGraphs

pytestmark = pytest.mark.filterwarnings("ignore")

#: Autograd sees one node of what it compiles, as of Inductor's code, and it needs no compiler of C++.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A layer that adds a mean over its features, or over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.over = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + x.mean(self.over, keepdim=True)


class Net(nn.Module):
    """Two blocks, each compiled by itself, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 3)
        for block in self.body:
            block.compile(backend=BACKEND)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Losses:
    """A compiled loss, its graph compared as a training does."""

    def __init__(self) -> None:
        self.net, self.root = nn.Linear(4, 4), False
        self.graphs = LossGraphs(self.net)
        self.compiled = torch.compile(self._loss, backend=BACKEND)

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).view(len(x), 2, 2).square().mean() / 3
        return loss.sqrt() if self.root else loss

    def batch(self, rows: int) -> None:
        self.graphs.next_batch()
        self.graphs.check(self.compiled(torch.ones(rows, 4)))


def test_compiled_code_that_changes_is_seen() -> None:
    losses = Losses()
    losses.batch(8)
    losses.root = True
    with pytest.raises(LossChangedError, match="sqrt"):
        losses.batch(8)


def test_batches_of_other_sizes_and_evaluations_are_compiled_anew_and_are_alike() -> None:
    losses = Losses()
    for rows in (8, 5, 8, 3, 1):
        losses.batch(rows)
    losses.root = True
    with torch.no_grad():
        losses.compiled(torch.ones(7, 4))
    losses.root = False
    losses.batch(6)


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "an index": (lambda x: x[:, :1], lambda x: x[:1]),
    "a number as an index": (lambda x: x[:, 0], lambda x: x[0]),
    "dimensions one by one": (lambda x: x[:, None].permute(2, 0, 1)[0], lambda x: x[:, None].permute(2, 1, 0)[0]),
    "two dimensions": (lambda x: x[:, None].transpose(1, 2).sum(1), lambda x: x[:, None].transpose(0, 2).sum(1)),
    "an equation": (lambda x: torch.einsum("bi,bi->b", x, x), lambda x: torch.einsum("bi,bi->i", x, x)),
    "a moved dimension": (lambda x: x[:, None].movedim(0, 1), lambda x: x[:, None].movedim(0, 2)),
    "a reduction by its place": (
        lambda x: F.mse_loss(x, x * 2, None, None, "mean"),
        lambda x: F.mse_loss(x, x * 2, None, None, "sum"),
    ),
    "an operator's own name": (
        lambda x: torch.ops.aten.sum.dim_IntList(x, [1]),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [0]),
    ),
    "a mean": (lambda x: x.mean(1), lambda x: x.mean(0)),
    "an activation": (torch.tanh, torch.sigmoid),
}


@pytest.mark.parametrize("dynamic", [None, True])
@each("name", CHANGES)
def test_what_compiled_code_does_with_its_elements_is_compared(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    net = nn.Linear(4, 4)
    graphs = LossGraphs(net)
    for number, code in enumerate(CHANGES[name]):
        compiled = torch.compile(lambda x, code=code: code(x).sum(), backend=BACKEND, dynamic=dynamic)
        graphs.next_batch()
        with pytest.raises(LossChangedError) if number else contextlib.nullcontext():
            graphs.check(compiled(net(torch.ones(8, 4))))


NUMBERS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "a weight of a schedule": lambda x, number: x.mean() * number,
    "a bound": lambda x, number: x.clamp(max=number).mean(),
    "the number of samples": lambda x, _number: x.sum() * (1.0 / len(x)),
    "a root of it": lambda x, _number: x.sum() / len(x) ** 0.5,
}


@each("name", NUMBERS)
def test_numbers_of_compiled_code_may_change_as_they_may_elsewhere(name: str) -> None:
    torch._dynamo.reset()
    net = nn.Linear(4, 4)
    graphs, compiled = LossGraphs(net), torch.compile(NUMBERS[name], backend=BACKEND)
    for at, rows in enumerate((8, 8, 8, 5, 3, 8)):
        graphs.next_batch()
        graphs.check(compiled(net(torch.ones(rows, 4)), 1.0 / (1 + at)))


def stepped(net: Net, rows: int) -> list[Any]:
    net.zero_grad()
    torch.manual_seed(rows)
    (F.mse_loss(net(torch.randn(rows, 4 + 2)), torch.randn(rows, 3)) - 1.0).abs().backward()
    torch.optim.SGD(net.parameters(), 0.0).step()
    return [one.grad.clone() for one in net.parameters() if one.grad is not None]


@pytest.mark.parametrize("again", [1, 3])
def test_compiled_blocks_run_in_slices_until_they_compute_something_else(again: int) -> None:
    net = Net()
    undo = install(net, Recipe(slices=Slices(Body("body", ("0",)), 3, again)))
    in_slices = [stepped(net, rows) for rows in (12, 7, 12)]
    undo()
    for found, rows in zip(in_slices, (12, 7, 12), strict=True):
        torch.testing.assert_close(found, stepped(net, rows))

    undo = install(net, Recipe(slices=Slices(Body("body", ("0",)), 3, again)))
    torch._dynamo.reset()
    stepped(net, 12)
    for block in net.body:
        block.over = 0
    with pytest.warns(UserWarning, match="'body'"):
        whole = stepped(net, 12)
    undo()
    torch.testing.assert_close(whole, stepped(net, 12))


def test_what_is_compiled_with_its_caller_runs_whole() -> None:
    net = Net()
    net.compile(backend=BACKEND)
    undo = install(net, Recipe(slices=Slices(Body("body", ("0",)), 3, 1)))
    stepped(net, 12)
    for block in net.body:
        block.over = 0
    found = stepped(net, 12)
    undo()
    torch.testing.assert_close(found, stepped(net, 12))


def body_of(net: nn.Module, around: Callable[[Any], Any] = lambda loss: loss) -> Body:
    step = TrainingStep(
        model=net,
        batch=lambda count: torch.ones(count, 6),
        loss=around(lambda model, batch: model(batch).square().mean()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    return find_body(step, 8)


def test_what_is_compiled_around_a_body_is_named() -> None:
    assert body_of(Net()).name == ""
    assert body_of(Net(), torch.compiler.disable).name == ""  # as the step of an optimizer is, with its closure in it
    net = Net()
    net.compile(backend=BACKEND)
    with pytest.raises(UnsupportedTechniqueError, match=r"torch\.compile"):
        body_of(net)
