"""What a step reads and a script's other code changes between two steps, however that code is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from vram_guard.proof.later_changes import CodeRun, functions_around


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_call = self.by_setter = 1.0
        self.begin()
        self.put(1.0)

    def begin(self) -> None:
        self.set_once = 1.0

    def put(self, value: float) -> None:
        self.by_method = value

    @property
    def rate(self) -> float:
        return self.by_setter

    @rate.setter
    def rate(self, value: float) -> None:
        self.by_setter = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by_call * self.by_setter * self.by_method * self.set_once


class Halves:
    def __init__(self, net: Net) -> None:
        self.net = net

    def __call__(self) -> None:
        self.net.by_call *= 0.5


def test_changes_by_calls_setters_and_methods_that_a_constructor_calls_too() -> None:
    net = Net()
    halve = Halves(net)
    with CodeRun() as ran:
        net(torch.ones(2))
    found = list(ran.changed_later(net, functions_around()))
    halve()
    net.rate = 0.5
    net.put(0.5)
    assert sorted(found) == [
        "the step reads by_call, which Halves.__call__ changes",
        "the step reads by_method, which Net.put changes",
        "the step reads by_setter, which Net.rate changes",
    ]


def test_what_a_running_function_has_set_before_its_loop_stays() -> None:
    net = Net()
    net.by_setter = 2.0
    net.put(0.5)
    found = []
    for at in range(2):
        for _turn in range(2):
            with CodeRun() as ran:
                net(torch.ones(2))
            found.append(set(ran.changed_later(net, functions_around())))
        net.by_call = float(at)
    net.set_once = 3.0
    name = "test_what_a_running_function_has_set_before_its_loop_stays"
    changed = {f"the step reads {one}, which {name} changes" for one in ("by_call", "set_once")}
    assert all({one for one in each if name in one} == changed for each in found)


def looked_at(net: Net) -> set[str]:
    with CodeRun() as ran:
        net(torch.ones(2))
    found = ran.changed_later(net, functions_around())
    return {why.split()[3].rstrip(",") for why in found if "sets_before_its_loop" in why}


def sets_before_its_loop(net: Net, *, later: bool) -> list[set[str]]:
    net.by_setter = 2.0

    def ends() -> None:
        net.set_once = 3.0

    found = [looked_at(net) for _step in range(2)]
    if later:
        ends()
    return found


def test_what_a_running_function_has_set_stays_where_it_is_called_once() -> None:
    found = sets_before_its_loop(Net(), later=True)
    assert found == [{"set_once"}] * 2


def test_a_loop_calls_a_running_function_again() -> None:
    for _epoch in range(2):
        assert sets_before_its_loop(Net(), later=False) == [{"set_once", "by_setter"}] * 2


def sets_up(net: Net) -> None:
    net.by_setter = 2.0
    sets_up_more(net)


def sets_up_more(net: Net) -> None:
    net.by_call = 2.0


def sets_in_a_closure(net: Net) -> Callable[[], None]:
    net.by_setter = 2.0

    def later() -> None:
        net.set_once = 2.0

    return later


def sets_in_turns(net: Net) -> Iterator[None]:
    yield
    net.by_call = 2.0


def sets_by_name(net: Net) -> Callable[[Net], None]:
    return sets_up_more


KEPT = list[Callable[[Net], None]]()


def keeps(function: Callable[[Net], None]) -> Callable[[Net], None]:
    KEPT.append(function)
    return function


@keeps
def sets_where_it_is_kept(net: Net) -> None:
    net.by_call = 2.0


def what_changes(net: Net) -> set[str]:
    with CodeRun() as ran:
        net(torch.ones(2))
    return {
        why.rsplit("which ", 1)[1].split()[0] for why in ran.changed_later(net, functions_around()) if "sets_" in why
    }


ONCE_CALLED = sys.version_info >= (3, 11)  # earlier bytecode does not tell a call from another use of a name


def before_the_loop(net: Net) -> set[str]:
    sets_up(net)
    return set().union(*(what_changes(net) for _step in range(2)))


def in_the_loop(net: Net) -> set[str]:
    found = set[str]()
    sets_up(net)
    for _step in range(2):
        found |= what_changes(net)
        sets_up(net)
    return found


def by_another_name(net: Net) -> set[str]:
    sets_up(net)
    hook = sets_up
    found = what_changes(net)
    hook(net)
    return found


def by_a_closure(net: Net) -> set[str]:
    later = sets_in_a_closure(net)
    found = what_changes(net)
    later()
    return found


def in_turns(net: Net) -> set[str]:
    turns = sets_in_turns(net)
    found = what_changes(net)
    next(turns, None)
    return found


def by_name(net: Net) -> set[str]:
    later = sets_by_name(net)
    found = what_changes(net)
    later(net)
    return found


def by_a_decorator(net: Net) -> set[str]:
    sets_where_it_is_kept(net)
    found = what_changes(net)
    KEPT[0](net)
    return found


@pytest.mark.parametrize(
    ("script", "changing"),
    [
        (before_the_loop, set() if ONCE_CALLED else {"sets_up", "sets_up_more"}),
        (in_the_loop, {"sets_up", "sets_up_more"}),
        (by_another_name, {"sets_up", "sets_up_more"}),
        (by_a_closure, {"sets_in_a_closure"}),
        (in_turns, {"sets_in_turns"}),
        (by_name, {"sets_up_more"}),
        (by_a_decorator, {"sets_where_it_is_kept"}),
    ],
)
def test_what_a_function_has_set_before_the_loop_stays_unless_it_may_run_again(
    script: Callable[[Net], set[str]], changing: set[str]
) -> None:
    assert script(Net()) == changing


@pytest.mark.parametrize(
    ("line", "changing"),
    [
        ("sets_up(net)", set() if ONCE_CALLED else {"sets_up", "sets_up_more"}),
        ("kept = id(sets_up)", {"sets_up", "sets_up_more"}),
        ("kept = sets_up, id(net)", {"sets_up", "sets_up_more"}),
        ("kept = id(net), sets_up", {"sets_up", "sets_up_more"}),
    ],
)
def test_a_script_that_calls_at_its_top(line: str, changing: set[str]) -> None:
    names = {**globals(), "net": Net()}
    exec(compile(f"{line}\nfound = what_changes(net)", __file__, "exec"), names)
    assert names["found"] == changing
