"""Parts of the space that a search goes through: which blocks, in which order, and what a pin leaves of it."""

from __future__ import annotations

from typing import Any

import pytest

from vram_guard.errors import InvalidInputError
from vram_guard.limits import MOST_FROZEN
from vram_guard.plan._space import Parts, _frozen, _orders, _pinned, _prefixes, _switch
from vram_guard.plan.pins import Pins

PARTS = Parts(
    blocks=("a", "b", "c"),
    saved={"a": 10, "b": 40, "c": 1000},
    recompute={"a": 1.0, "b": 2.0, "c": 100.0},
    offload={"a": 2.0, "b": 2.0, "c": 200.0},
)


def test_blocks_are_ordered_by_bytes_for_a_second_and_by_bytes() -> None:
    assert [*_orders(PARTS.blocks, PARTS)] == [("b", "a", "c"), ("c", "b", "a")]
    equal = Parts(blocks=("a", "b"), saved={"a": 1001, "b": 1002}, recompute={"a": 1.0, "b": 1.0})
    assert [*_orders(equal.blocks, equal)] == [("a", "b")] * 2  # the order of their forward
    nothing_known = Parts(blocks=("a", "b"), saved={"a": 1, "b": 2}, recompute={"b": 1.0})
    assert next(_orders(nothing_known.blocks, nothing_known)) == ("b", "a")


@pytest.mark.parametrize(
    ("pin", "modules"), [(None, ()), ("none", ()), (0, ()), (2, ("a", "b")), ("all", ("a", "b", "c")), (("x",), ("x",))]
)
def test_modules_that_a_pin_names(pin: Any, modules: tuple[str, ...]) -> None:
    assert _pinned("checkpoint", pin, PARTS.blocks) == modules


@pytest.mark.parametrize(("pin", "has"), [("all", ()), (4, PARTS.blocks)])
def test_pins_of_more_than_there_is_are_refused(pin: Any, has: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match="pin: checkpoint"):
        _pinned("checkpoint", pin, has)


def test_what_blocks_may_become() -> None:
    both = frozenset({"checkpoint", "offload_activations"})
    found = [(one.method, one.blocks) for one in _prefixes(both, PARTS, Pins())]
    assert found == [
        ("checkpoint", ("b", "a", "c")),
        ("checkpoint", ("c", "b", "a")),
        ("offload_activations", ("a", "b", "c")),
        ("both", ("a", "b", "c")),
    ]
    pinned = [(one.method, one.blocks) for one in _prefixes(both, PARTS, Pins(checkpoint=1))]
    assert pinned == [("offload_activations", ("b", "c"))]
    assert [*_prefixes(frozenset(), PARTS, Pins())] == []


def test_switches_and_frozen_modules() -> None:
    assert (_switch(None, allowed=True), _switch(None, allowed=False)) == ((False, True), (False,))
    assert (_switch(True, allowed=False), _switch(False, allowed=True)) == ((True,), (False,))
    few = Parts(frozen=("f", "g"))
    many = Parts(frozen=tuple(map(str, range(MOST_FROZEN + 1))))
    allowed = frozenset({"offload_frozen"})
    assert _frozen(allowed, few, Pins()) == [(), ("f",), ("f", "g")]
    assert _frozen(frozenset(), few, Pins()) == [()]
    assert _frozen(allowed, many, Pins()) == [(), many.frozen]
    assert _frozen(frozenset(), few, Pins(frozen_on_host=("g",))) == [("g",)]
