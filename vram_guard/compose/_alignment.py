"""Alignment: the same tensors in two runs of nearly the same operators."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher


def aligned(one: Sequence[Hashable], other: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Places of equal items in both, in order: at the ends as far as they are equal, between them by longest runs."""
    start, end, there = 0, len(one), len(other)
    while start < min(end, there) and one[start] == other[start]:
        yield start, start
        start += 1
    kept = 0
    while start < min(end, there) and one[end - 1] == other[there - 1]:
        end, there, kept = end - 1, there - 1, kept + 1
    if start < end and start < there:
        matcher = SequenceMatcher(None, one[start:end], other[start:there], autojunk=False)
        for left, right, length in matcher.get_matching_blocks():
            yield from ((start + left + at, start + right + at) for at in range(length))
    yield from ((end + at, there + at) for at in range(kept))
