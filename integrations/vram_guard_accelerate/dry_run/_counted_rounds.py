"""Rounds of loops that call ``next`` or hold other loops: they end early where modules count with this ``range``."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from vram_guard_accelerate._script_files import is_users
from vram_guard_accelerate.dry_run._script_source import function_of, inside, is_next, loops_around


class Rounds:
    """The rounds of a loop, which can end early.

    Args:
        of: all of them.
    """

    def __init__(self, of: range) -> None:
        self.of = of
        self.left: Callable[[bool], None] | None = None
        """Called at the next round, which does not come then."""

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[int]:
        for number in self.of:
            if self.left is not None:
                break
            yield number
        if self.left is not None:
            self.left(True)
            self.left = None


#: The latest of each loop, by the identity of its frame and its line.
_counted: dict[tuple[int, int], Rounds] = {}


class _RangeType(type):
    """``range``, as the modules of the script see it."""

    def __call__(cls, *args: Any) -> Any:
        made = builtins.range(*args)
        frame = sys._getframe(1)  # noqa: SLF001 - who counts is the question
        node = function_of(frame.f_code)
        for loop in [] if node is None else loops_around(node, frame.f_lineno):
            if isinstance(loop, ast.For) and loop.lineno == frame.f_lineno and any(map(_may_end, inside(loop))):
                counted = _counted[id(frame), loop.lineno] = Rounds(made)
                return counted
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.range)


def _may_end(part: ast.AST) -> bool:
    """True in loops over batches, and over epochs."""
    return is_next(part) or isinstance(part, (ast.For, ast.While))


class _Range(metaclass=_RangeType):
    """See :class:`_RangeType`."""


def count_rounds() -> None:
    """From here on, the script's modules count the rounds of such loops in a way that can end."""
    for module in list(sys.modules.values()):
        if is_users(str(getattr(module, "__file__", None) or "<")):
            vars(module).setdefault("range", _Range)


def counted_rounds(frame: FrameType, line: int) -> Rounds | None:
    """Those of the loop at this line of a frame; None where they are not counted so."""
    return _counted.get((id(frame), line))
