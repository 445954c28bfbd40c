"""A mark for the comparison of recomputations: a trace tells what that allocates from what the step does."""

from __future__ import annotations


class _Comparing:
    """A context; one cannot be entered within another."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_error: object) -> None:
        self.now = False


comparing = _Comparing()
