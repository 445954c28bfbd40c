"""Sequences of pieces that are there once and of loops, found by comparing two that differ by a round of each loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from vram_guard.compose._errors import CannotComposeError
from vram_guard.limits import ROUNDS_PEELED


class Item(NamedTuple):
    """One entry of a sequence: what it is, and its numbers, each of which may grow from round to round."""

    key: Hashable
    numbers: tuple[int, ...]
    value: Any
    """The entry itself."""


@dataclass(frozen=True)
class SequencePart:
    """A piece of a sequence that is there once, or a loop.

    Attributes:
        items: the piece, or the first round, with its numbers at the smaller depth.
        by_depth: what each number grows by with the depth.
        by_round: what it grows by from round to round.
        rounds: at the smaller depth; 0: a piece that is there once.
    """

    items: Sequence[Item]
    by_depth: Sequence[tuple[int, ...]]
    by_round: Sequence[tuple[int, ...]]
    rounds: int = 0


def parts_of(small: Sequence[Item], large: Sequence[Item]) -> Iterator[SequencePart]:
    """The pieces and loops of a sequence, from it at two depths.

    Raises:
        CannotComposeError: the larger one is not the smaller one with one round more in some places.
    """
    kinds: dict[Hashable, int] = {}
    one, other = ([kinds.setdefault(item.key, len(kinds)) for item in items] for items in (small, large))
    done = here = there = 0  # ``done``: entries of ``large`` that parts have been made of; behind by ``there - here``
    while True:
        while here < len(one) and there < len(other) and one[here] == other[there]:
            here, there = here + 1, there + 1
        behind = there - here
        if here == len(one) and there == len(other):
            yield _piece(small[done - behind :], large[done:])
            return
        length = _round(one, other, here, there)
        start = there
        while start > done and other[start - 1] == other[start - 1 + length]:
            start -= 1
        start += (there - start) % length
        rounds = (there - start) // length
        first = _rounds(small, start - behind, length, rounds)
        second = _rounds(large, start, length, rounds + 1)
        head, tail = _peeled(first, second)
        begins, ends = start + head * length, there + length - tail * length
        yield _piece(small[done - behind : begins - behind], large[done:begins])
        yield _loop(first[head : rounds - tail], second[head : rounds + 1 - tail])
        done = ends
        there += length


def _round(one: Sequence[int], other: Sequence[int], here: int, there: int) -> int:
    """Entries of the round that the larger sequence has more before what both go on with."""
    best, length = -1, 0
    for count in range(1, min(there, (len(other) - there) - (len(one) - here)) + 1):
        if other[there : there + count] != other[there - count : there]:
            continue
        same = _common(one, here, other, there + count)
        if same > best:
            best, length = same, count
    if not length:
        raise CannotComposeError("what a block more adds is not a round like the one before it")
    return length


def _common(one: Sequence[int], here: int, other: Sequence[int], there: int) -> int:
    """Entries in which the sequences are the same from these places on; their ends count as one."""
    most = min(len(one) - here, len(other) - there)
    same = next((count for count in range(most) if one[here + count] != other[there + count]), most)
    return same + (here + same == len(one) and there + same == len(other))


_Rounds = list[list[Item]]


def _rounds(items: Sequence[Item], start: int, length: int, count: int) -> _Rounds:
    return [list(items[start + turn * length : start + (turn + 1) * length]) for turn in range(count)]


def _peeled(small: _Rounds, large: _Rounds) -> tuple[int, int]:
    """Rounds at the beginning and at the end whose numbers follow no law with the others; as few as possible."""
    for most in range(2 * ROUNDS_PEELED + 1):
        for head in range(most + 1):
            tail = most - head
            if len(small) - most >= 2 and _lawful(small[head : len(small) - tail], large[head : len(large) - tail]):
                return head, tail
    raise CannotComposeError("the numbers of a loop follow no law")


def _lawful(small: _Rounds, large: _Rounds) -> bool:
    slopes = _differences(large[0], large[1])
    growth = _differences(small[0], large[0])
    return all(
        _differences(before, after) == slopes for rounds in (small, large) for before, after in pairwise(rounds)
    ) and all(_differences(one, other) == growth for one, other in zip(small, large, strict=False))


def _differences(one: Sequence[Item], other: Sequence[Item]) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in zip(first.numbers, second.numbers, strict=True))
        for first, second in zip(one, other, strict=True)
    ]


def _piece(small: Sequence[Item], large: Sequence[Item]) -> SequencePart:
    by_depth = _differences(small, large)
    return SequencePart(small, by_depth, [()] * len(by_depth))


def _loop(small: _Rounds, large: _Rounds) -> SequencePart:
    return SequencePart(small[0], _differences(small[0], large[0]), _differences(large[0], large[1]), len(small))
