"""Containers, modules and random generators, remembered and put back."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from each import each
from torch import nn

from vram_guard.state.containers import alike, contents_of, leaves, look, mapped, refill
from vram_guard.state.modules import ModuleState, statistics_kept
from vram_guard.state.random_generators import RandomState, random_state_kept


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Boxes:
    first: Any
    area: Any = field(default=None, init=False)


def boxes() -> Boxes:
    made = Boxes(1)
    made.area = 2
    return made


@each(
    "nested",
    [
        [1, (2, {"a": 3})],
        Pair(1, [2]),
        OrderedDict(a=1, b=2),
        UserDict(a=1),
        MappingProxyType({"a": 1}),
        boxes(),
        5,
    ],
)
def test_mapping_keeps_the_containers_and_their_order(nested: Any) -> None:
    found = list(leaves(nested))
    more = mapped(nested, lambda leaf: leaf + 1)
    assert type(more) is type(nested)
    assert list(leaves(more)) == [leaf + 1 for leaf in found]
    assert list(leaves(nested)) == found  # the original is as it was


@pytest.mark.parametrize("container", [[1, 2], {"a": 1, "b": 2}, {1, 2}, deque([1, 2])])
def test_content_is_put_back(container: Any) -> None:
    before = look(container)
    kept = type(container)(container)
    assert alike(container, before)
    container.clear()
    assert not alike(container, before)
    refill(container, before)
    assert container == kept


def test_of_a_long_list_only_what_was_appended_is_taken_off() -> None:
    container = [1, 2, 3]
    before, exact = look(container, most=2), look(container, most=3)
    assert (before, exact) == (3, [1, 2, 3])
    container += [4, 5]
    assert not alike(look(container, most=2), before)
    assert not alike(container, before)
    refill(container, before)
    assert container == [1, 2, 3]
    assert alike(look(container, most=2), before)


def test_a_module_gets_its_attributes_class_and_containers_back() -> None:
    class Other(nn.Linear):
        pass

    module = nn.Linear(1, 1)
    module.seen = [1]
    weight = module.weight
    state = ModuleState(module, contents_of([module.seen]))
    module.__class__ = Other
    module.seen.append(2)
    module.left = "behind"
    module.training = False
    with torch.no_grad():
        weight.fill_(3)
    state.restore()
    assert type(module) is nn.Linear
    assert (module.seen, module.training, hasattr(module, "left")) == ([1], True, False)
    assert module.weight is weight
    assert weight.item() == 3  # tensors keep what they hold now


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_stay_when_a_forward_runs_again(momentum: float | None) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=momentum), nn.BatchNorm1d(2, track_running_stats=False))
    x = torch.randn(4, 2) * 3 + 1
    model(x)
    norm = model[0]
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    counted = norm.num_batches_tracked
    with statistics_kept(model):
        model(x * 2)
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert norm.num_batches_tracked is counted
    assert norm.momentum == momentum
    model(x * 2)
    assert int(norm.num_batches_tracked) == 2


def draw(own: torch.Generator | None = None) -> list[float]:
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return drawn + ([float(torch.rand((), generator=own))] if own else [])


def test_every_generator_draws_its_numbers_again() -> None:
    own = torch.Generator()
    state = RandomState(devices=[torch.device("cpu")], generators=[own])
    first = draw(own)
    second = draw(own)
    state.restore()
    assert draw(own) == first
    with state.again():
        assert draw(own) == first
    assert draw(own) == second  # they go on where they were


@pytest.mark.parametrize(
    "drawn", [lambda _: torch.rand(()), lambda _: random.random(), lambda _: np.random.rand(), lambda own: own.seed()]
)
def test_a_number_drawn_from_any_generator_is_noticed(drawn: Callable[[torch.Generator], Any]) -> None:
    own = torch.Generator()
    state = RandomState(generators=[own])
    assert state.is_current()
    drawn(own)
    assert not state.is_current()


def test_generators_are_afterwards_what_they_were() -> None:
    state = RandomState()
    first = draw()
    state.restore()
    with random_state_kept():
        draw()
    assert draw() == first
    assert draw() != first
