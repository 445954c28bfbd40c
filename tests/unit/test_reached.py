"""The objects that a training's callables lead to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, ParamSpec, TypeVar

from vram_guard.state.reached import ReachedState, parts_of

T = TypeVar("T")
P = ParamSpec("P")


class Pair(Generic[T]):
    """Holds a list, and leads to a type variable."""

    def __init__(self, kept: list[T]) -> None:
        self.kept = kept
        self.of = T


def test_what_grows_beside_a_type_variable_is_found() -> None:
    """Python 3.12 says that type variables have a dictionary, and they have none."""
    for variable in (T, P):
        assert isinstance(parts_of(variable) or {}, Mapping)
    pair = Pair([1, 2])
    reached = ReachedState([("step", lambda: pair)])
    assert list(reached.kept()) == []
    pair.kept.append(3)
    assert [name for name, _ in reached.kept()] != []
