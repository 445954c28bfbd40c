"""Values that travel as JSON come back as what they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
from each import each

from vram_guard.budget import Budget
from vram_guard.codec import from_json, from_plain, to_json
from vram_guard.language import Message as Translated
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.techniques.recipe import Recipe
from vram_guard.timeline import Estimate, Phase
from vram_guard.units import Amount


class Point(NamedTuple):
    x: int
    of: tuple[object, ...] = ()


@dataclass(frozen=True)
class Refused:
    error: str


@dataclass(frozen=True)
class Message:
    name: str
    kind: Literal["one", "two"] = "one"
    share: float = 0.5
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] | None = None
    by_name: Mapping[str, list[int] | None] = field(default_factory=dict)
    anything: Any = None


@each(
    "value",
    [
        Message("a"),
        Message("é", "two", 1.0, (Point(1), Point(2, ("b", 3))), (1, "x"), {"f": [1, 2], "g": None}, {"k": [1]}),
        Refused("why"),
        Recipe(checkpoint=("blocks.0",), optimizer="fused"),
        Budget.resolve("RTX 4090"),
        Estimate(2, 3, 4, {"batch": 3}, {"": 3}, Phase("setup", 0, 0), "", "", "", "symbolic"),  # type: ignore[arg-type]
    ],
)
def test_what_is_written_is_read_back(value: object) -> None:
    text = to_json(value)
    assert text.isascii()
    assert from_json(type(value), text) == value


def test_a_union_is_what_its_fields_say() -> None:
    kinds: Any = Message | Refused
    assert from_plain(kinds, {"error": "why"}) == Refused("why")
    assert from_plain(kinds, {"name": "a"}) == Message("a")


@each(
    ("plain", "said"),
    [
        ({}, "missing field 'name'"),
        ({"name": 1}, "name: expected str, found int"),
        ({"name": "a", "kind": "three"}, "kind: 'three' is not one of 'one', 'two'"),
        ({"name": "a", "points": [{"x": 1}, {"x": "1"}]}, r"points\[1\]: x: expected int, found str"),
        ({"name": "a", "pair": [1]}, "pair: expected 2 items, found 1"),
        ({"name": "a", "by_name": {"k": [True]}}, r"by_name: k\[0\]: expected int, found bool"),
        ({"name": "a", "more": 1}, "unknown field 'more'"),
        (["a"], "expected an object, found list"),
        (None, "expected an object, found NoneType"),
    ],
)
def test_what_is_no_such_value_is_refused(plain: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"the value: {said}"):
        from_json(Message, json.dumps(plain))


def test_a_message_is_read_back_in_its_own_words_and_kind() -> None:
    reason = Reason(Why.SHORTAGE, peak=Amount(3 * 2**30), missing=Amount(2**30), usable=Amount(2**31))
    again = from_json(Reason, to_json(reason))
    assert (type(again), again.kind, str(again)) == (Reason, Why.SHORTAGE, str(reason))
    told = Translated("{count} of {what}", count=3, what=Translated("all"))
    assert str(from_json(Translated, to_json(told))) == "3 of all"
    with pytest.raises(ValueError, match="expected an object"):
        from_json(Reason, '"why"')
