"""Rounds of loops that call ``next`` or hold other loops: they end early where modules count with this ``range``."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

from vram_guard.user_code import is_users_file
from vram_guard_accelerate.dry_run._script_source import function_of, inside, loops_around


class Rounds(Sequence[int]):
    """The rounds of a loop, which can end early.

    Args:
        of: all of them.
    """

    def __init__(self, of: range) -> None:
        self.of = of
        self.left: Callable[[bool], None] | None = None
        """Called at the next round, which does not come then."""
        self.runs = False
        """A loop runs over them in their order."""

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, at: Any) -> Any:
        return self.of[at]

    def __iter__(self) -> Iterator[int]:
        self.runs = True
        try:
            for number in self.of:
                if self.left is not None:
                    break
                yield number
        finally:
            self.runs = False
        if self.left is not None:
            self.left(True)
            self.left = None


#: The latest of each loop, by the identity of its frame and its line.
_counted: dict[tuple[int, int], Rounds] = {}


class _RangeType(type):
    """``range``, as the modules of the script see it."""

    def __call__(cls, *args: Any) -> Any:
        return _counted_at(sys._getframe(1), builtins.range(*args))  # noqa: SLF001 - who counts is the question

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.range)


def _counted_at(frame: FrameType, made: range) -> range | Rounds:
    """The rounds of the loop at which a frame of the script stands; the range itself where it stands at none."""
    line = _loop_at(frame.f_code, frame.f_lineno)
    if line is None:
        return made
    counted = _counted[id(frame), line] = Rounds(made)
    return counted


@cache
def _loop_at(code: CodeType, line: int) -> int | None:
    """The line of a loop over batches or epochs that begins at a line of a function."""
    node = function_of(code)
    for loop in [] if node is None else loops_around(node, line):
        if isinstance(loop, ast.For) and loop.lineno == line and any(map(_may_train, loop.body)):
            return line
    return None


def _may_train(statement: ast.stmt) -> bool:
    """True for statements that may run over batches, if only in a function that they call."""
    return any(isinstance(part, (ast.For, ast.While, ast.Call)) for part in (statement, *inside(statement)))


class _Range(metaclass=_RangeType):
    """See :class:`_RangeType`."""


def count_rounds() -> None:
    """From here on, the script's modules count the rounds of such loops in a way that can end."""
    for module in list(sys.modules.values()):
        if is_users_file(str(getattr(module, "__file__", None) or "<")):
            vars(module).setdefault("range", _Range)
            bar = vars(module).get("trange")
            if str(getattr(bar, "__module__", "")).startswith("tqdm."):
                vars(module)["trange"] = _bar_of(bar)


def _bar_of(trange: Any) -> Callable[..., Any]:
    """Tqdm's ``trange``, which calls ``range`` in a module of its own."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        rounds = _counted_at(sys._getframe(1), builtins.range(*args))  # noqa: SLF001 - as above
        return trange.__globals__["tqdm"](rounds, **kwargs)

    return counted


def counted_rounds(frame: FrameType, line: int) -> Rounds | None:
    """Those of the loop that runs at this line of a frame; None where they are not counted so."""
    found = _counted.get((id(frame), line))
    return found if found is not None and found.runs else None
