"""Places in a training: what its steps decide by the number of the epoch or of the step, as they ask for it."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vram_guard.limits import STEPS_ONE_BY_ONE


class StepDecisions:
    """The decisions of steps that ask how far the training is: two places with the same decisions have equal steps.

    Example:
        >>> asked = StepDecisions()
        >>> if asked.answer("epoch", 0) % 2 == 1:
        ...     print("every other epoch")
        >>> asked.followed({"epoch": 0})
        >>> [epoch for epoch in range(4) if asked.differs({"epoch": epoch})]
        [1, 3]
    """

    def __init__(self) -> None:
        self.in_loss = False
        """A loss has asked, not only what runs around steps."""
        self._computes_loss = False
        self._decided: dict[str, _Decided] = {}
        self._followed: list[dict[str, int]] = []
        self._kinds: set[tuple[Any, ...]] = set()
        self._known = 0
        """Decisions that the kinds are made of."""

    def __bool__(self) -> bool:
        """True if a step has asked for a number."""
        return bool(self._decided)

    @property
    def undecided(self) -> bool:
        """True if a number, or what was computed of it, was asked for and decided nothing: it may be an amount."""
        return any(one.undecided for one in self._decided.values())

    @contextlib.contextmanager
    def computing_loss(self) -> Iterator[None]:
        """What asks inside the block may compute another loss by the answer."""
        self._computes_loss = True
        try:
            yield
        finally:
            self._computes_loss = False

    def answer(self, name: str, value: int) -> int:
        """The number of this name, which notes what is decided by it."""
        self.in_loss |= self._computes_loss
        noting: int = _NotingInt.made(value, (), lambda place: place, self._decided.setdefault(name, _Decided()))
        return noting

    def differs(self, place: Mapping[str, int]) -> bool:
        """True if no step that was followed had the decisions of this place.

        Args:
            place: name -> number, of all that were asked for.
        """
        known = sum(len(one.decisions) for one in self._decided.values())
        if known != self._known:
            self._known, self._kinds = known, {self._kind(one) for one in self._followed}
        return self._kind(place) not in self._kinds

    def followed(self, place: Mapping[str, int]) -> None:
        """A step was followed here."""
        self._followed.append(dict(place))
        self._kinds.add(self._kind(place))

    def steps(self, name: str, first: int, end: int) -> Iterator[int]:
        """Steps of an epoch at which something may be decided for the first time.

        Args:
            name: of the number of steps.
            first: step of the epoch.
            end: of the epoch.
        """
        if name not in self._decided:
            yield first
            return
        near = set(range(first, min(end, first + STEPS_ONE_BY_ONE)))
        for number in self._decided[name].numbers:
            multiple = -(-first // number) * number  # of what a remainder is asked of
            near |= {at + by for at in (number, multiple) for by in (-1, 0, 1)}
        yield from sorted(step for step in near if first <= step < end)

    def _kind(self, place: Mapping[str, int]) -> tuple[Any, ...]:
        found = self._decided.items()
        return tuple(decide(place[name]) for name, one in found for decide in one.decisions.values())


# --- numbers --------------------------------------------------------------------------------------------------


@dataclass
class _Decided:
    """What was decided by one number.

    Attributes:
        decisions: how each was made -> number -> decision.
        numbers: that it was compared with, or divided by.
        undecided: one for each number that was neither compared nor computed with.
    """

    decisions: dict[Any, Callable[[int], Any]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    undecided: set[object] = field(default_factory=set)


class _Noting:
    """A number that notes what is decided by it, and by what is computed of it.

    Attributes:
        _key: how it was computed.
        _of: computes it of the number that was asked for.
        _unused: among the undecided.
    """

    _key: tuple[Any, ...]
    _of: Callable[[int], Any]
    _decided: _Decided
    _unused: object

    @classmethod
    def made(cls, value: float, key: tuple[Any, ...], of: Callable[[int], Any], decided: _Decided) -> Any:
        made: Any = cls.__new__(cls, value)  # type: ignore[call-arg]
        unused = object()
        vars(made).update(_key=key, _of=of, _decided=decided, _unused=unused)
        decided.undecided.add(unused)
        return made


def _method(compute: Callable[..., Any], *, decides: bool) -> Callable[..., Any]:
    """A special method of numbers: what is computed is noted, or notes in its turn."""

    def method(self: Any, *others: Any) -> Any:
        plain = tuple(map(_plain, others))
        if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in plain):
            return NotImplemented
        own, decided = self._of, self._decided
        decided.undecided.discard(self._unused)
        key = (*self._key, compute, *plain)
        decided.numbers.update(int(one) for one in plain if one >= 1)
        value = compute(_plain(self), *plain)

        def of(place: int) -> Any:
            return compute(own(place), *plain)

        if decides:
            decided.decisions[key] = of
            return value
        kind = _KINDS.get(type(value))
        return value if kind is None else kind.made(value, key, of, decided)

    return method


def _plain(value: Any) -> Any:
    """The number itself."""
    return +value if isinstance(value, (_NotingInt, _NotingFloat)) else value


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Noting, f"__{_name}__", _method(getattr(operator, _name), decides=True))
_Noting.__bool__ = _method(bool, decides=True)  # type: ignore[attr-defined]
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod"):
    _operator = getattr(operator, _name)
    setattr(_Noting, f"__{_name}__", _method(_operator, decides=False))
    reflected = _method(lambda one, other, compute=_operator: compute(other, one), decides=False)
    setattr(_Noting, f"__r{_name}__", reflected)


class _NotingInt(_Noting, int):
    __hash__ = int.__hash__


class _NotingFloat(_Noting, float):
    __hash__ = float.__hash__


_KINDS: dict[type, type[_Noting]] = {int: _NotingInt, float: _NotingFloat}
