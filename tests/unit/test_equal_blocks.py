"""Lists of equal blocks, and the model with fewer of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from each import each

torch = pytest.importorskip("torch")

from parallel_cases import Net  # noqa: E402
from torch import nn  # noqa: E402

from vram_guard.techniques.equal_blocks import equal_blocks, with_depth  # noqa: E402


class Pair(nn.Module):
    """A frozen model, one block of another kind, and a model of the same depth that learns to differ."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.original = Net(blocks=depth).requires_grad_(False)
        self.between = nn.ModuleList(Net(blocks=1).requires_grad_(False) for _ in range(3))
        self.student = Net(blocks=depth)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = self.original(words)
            for net in self.between:
                known = known + net(words)
        return self.student(words) - known


def numbered(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):
        block.number, block.scale = number, 0.1 / (number + 1)
    return model


def one_wider(model: nn.Module) -> nn.Module:
    model.blocks[2].up, model.blocks[2].down = nn.Linear(40, 90), nn.Linear(90, 40)
    return model


def one_frozen(model: nn.Module) -> nn.Module:
    model.blocks[2].requires_grad_(False)
    return model


def one_twice(model: nn.Module) -> nn.Module:
    model.blocks[2] = model.blocks[1]
    return model


def one_outside(model: nn.Module) -> nn.Module:
    model.first = model.blocks[0]
    return model


def one_tied(model: nn.Module) -> nn.Module:
    model.bias = model.blocks[1].down.bias
    return model


def one_dropping(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):
        block.every = 0 if number % 2 else 8
    return model


def test_blocks_that_differ_in_their_number_are_equal() -> None:
    model = numbered(Net(blocks=4))
    blocks = equal_blocks(model)
    assert blocks is not None
    assert blocks == (("blocks",), 4)
    whole = list(model.state_dict())
    with with_depth(model, blocks, 2):
        assert len(model.blocks) == 2
    assert list(model.state_dict()) == whole


def test_the_blocks_of_every_stack_come_back_after_an_error() -> None:
    model = Pair(4)
    blocks = equal_blocks(model)
    assert blocks is not None
    whole = list(model.state_dict())
    with contextlib.suppress(ZeroDivisionError), with_depth(model, blocks, 2):
        assert (len(model.original.blocks), len(model.student.blocks)) == (2, 2)
        raise ZeroDivisionError
    assert list(model.state_dict()) == whole


@each("change", [one_wider, one_frozen, one_twice, one_outside, one_tied, one_dropping])
def test_blocks_that_differ_or_are_shared_are_not(change: Callable[[nn.Module], nn.Module]) -> None:
    assert equal_blocks(change(Net(blocks=4))) is None


def test_blocks_that_checkpoint_themselves_are_equal_too() -> None:
    model = Net(blocks=4)
    model.blocks.gradient_checkpointing = True
    blocks = equal_blocks(model)
    assert blocks is not None
    assert blocks.stacks == ("blocks",)
