"""The share of allocations that a prediction finds in order.

The recorded and the predicted step are two sequences of requested sizes in bytes, before the allocator rounds them. The
longest common subsequence is the largest number of recorded allocations that the prediction has too, in the same order
and of the same size to the byte. The share is its length over the longer sequence's: an allocation that is missing
counts against the prediction, and so does one that is too much.
"""

from __future__ import annotations

from collections.abc import Sequence


def common_in_order(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common subsequence.

    The greedy algorithm of E. Myers, "An O(ND) difference algorithm and its variations" (Algorithmica, 1986): fast
    where little differs. After ``edits`` insertions and deletions, ``furthest[diagonal]`` is the furthest position in
    ``one`` that can be reached on that diagonal; a common subsequence is what is neither inserted nor deleted.
    """
    furthest = {1: 0}
    for edits in range(len(one) + len(other) + 1):
        for diagonal in range(-edits, edits + 1, 2):
            left, right = furthest.get(diagonal - 1, -1), furthest.get(diagonal + 1, -1)
            x = right if diagonal == -edits or (diagonal != edits and left < right) else left + 1
            y = x - diagonal
            while x < len(one) and y < len(other) and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(one) and y >= len(other):
                return (len(one) + len(other) - edits) // 2
    return 0


def share_in_order(recorded: Sequence[int], predicted: Sequence[int]) -> float:
    """The length of the longest common subsequence over that of the longer sequence."""
    return common_in_order(recorded, predicted) / max(len(recorded), len(predicted), 1)
