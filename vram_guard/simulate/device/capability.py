"""The compute capability of the simulated GPU, which keeps what a trace asks of it.

Kernels differ between classes of capabilities, not between all of them: a trace depends on the answers that it was
given, and is the same on every GPU that gives these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

A = TypeVar("A")
Version = tuple[int, int]


@dataclass(frozen=True)
class Since:
    """Whether a compute capability is this one or a later one."""

    first: Version

    def __call__(self, version: Version) -> bool:
        """The answer."""
        return version >= self.first


#: Ampere and later, which flash attention needs too.
HAS_BFLOAT16 = Since((8, 0))


class Capability:
    """A compute capability as a trace sees it: it is asked, never read, so that every answer is known.

    Args:
        version: (major, minor).

    Example:
        >>> ada = Capability((8, 9))
        >>> ada.says(Since((9, 0)))
        False
        >>> [question((12, 0)) == said for question, said in ada.answers]
        [False]
    """

    questions: ClassVar[int] = 0
    """How often any of them was asked in this process."""

    def __init__(self, version: Version) -> None:
        self.label = version
        """The version as the name of the GPU that is meant; what a trace does must not depend on it."""
        self._said: dict[Callable[[Version], Any], Any] = {}

    @classmethod
    def of(cls, given: Capability | Version) -> Capability:
        """``given``, if it is one already."""
        return given if isinstance(given, cls) else cls(given)  # type: ignore[arg-type]

    def says(self, question: Callable[[Version], A]) -> A:
        """The answer to a question, which depends on nothing else; it is hashable, and alike where it asks the same."""
        Capability.questions += 1
        if question not in self._said:
            self._said[question] = question(self.label)
        answer: A = self._said[question]
        return answer

    @property
    def version(self) -> Version:
        """(major, minor), for code that may do anything with it: no other capability answers alike."""
        return self.says(_itself)

    @property
    def answers(self) -> tuple[tuple[Callable[[Version], Any], Any], ...]:
        """The questions so far, each with its answer."""
        return tuple(self._said.items())


def _itself(version: Version) -> Version:
    return version
