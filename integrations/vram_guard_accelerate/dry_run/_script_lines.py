"""The script's own lines: who asks for a batch, loops that end early, branches that are entered.

A ``for`` loop over a loader ends when the loader says so. A loop that calls ``next`` a fixed number of times does not,
and a branch under ``if step % 500 == 0`` is not reached in a few steps. So the script's modules count the rounds of
such loops with a ``range`` that can end, and a copy watches the lines of the script's frames (``sys.settrace``): it
jumps once into each such branch, and behind a loop of another kind that is to end.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import CO_GENERATOR, CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from vram_guard.user_code import is_users_file
from vram_guard_accelerate.dry_run._counted_rounds import counted_rounds
from vram_guard_accelerate.dry_run._periodic_branches import Branch, branches_in, comes_besides, may_come, period_of
from vram_guard_accelerate.dry_run._script_source import (
    Loop,
    assigned_at,
    begins_round,
    function_of,
    holds,
    inside,
    is_next,
    line_after,
    loops_around,
)


@dataclass(frozen=True)
class Asker:
    """A frame of the script that calls ``next`` on an iterator by itself."""

    frame: FrameType
    loops: tuple[Loop, ...]
    """Those that run on the same iterator, outermost first."""

    @property
    def rounds(self) -> int | None:
        """Of the outermost loop; None where they cannot be told."""
        counted = counted_rounds(self.frame, self.loops[0].lineno)
        return None if counted is None else len(counted.of)


@dataclass
class _Watched:
    """The lines of a function of the script."""

    code: CodeType
    branches: dict[int, Branch] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)


@dataclass
class _Leaving:
    """A loop that is to end when its next round begins."""

    node: ast.AST
    """Its function."""
    loop: Loop
    left: Callable[[bool], None]
    before: int
    """The line of the function that ran last."""


def asker() -> Asker | None:
    """The script's frame that asks for a batch with ``next``; None where a ``for`` loop or a library asks."""
    frame = next(script_frames(sys._getframe(1)), None)  # noqa: SLF001 - who asks is the question
    node = None if frame is None else function_of(frame.f_code)
    if frame is None or node is None:
        return None
    for call in inside(node):
        if is_next(call) and call.lineno <= frame.f_lineno <= (call.end_lineno or 0):
            made = assigned_at(node, ast.unparse(call.args[0]))
            loops = loops_around(node, call.lineno)
            return Asker(frame, tuple(loop for loop in loops if made is None or not holds(loop, made)))
    return None


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the script below this one, innermost first, without generators and comprehensions."""
    while frame is not None:
        code = frame.f_code
        in_line = code.co_flags & CO_GENERATOR or (code.co_name.startswith("<") and code.co_name != "<module>")
        if is_users_file(code.co_filename) and not in_line:
            yield frame
        frame = frame.f_back


class ScriptLines:
    """Watches the lines of a script's frames in this process, from :meth:`watch` on.

    Args:
        entered: called when a branch is entered, with it and its period.
    """

    def __init__(self, entered: Callable[[Branch, int], None]) -> None:
        self.enters = False
        """Branches that did not come by themselves are entered where they are reached."""
        self._entered = entered
        self._watched: dict[int, _Watched] = {}
        """By the identity of their code, which is asked for at every call: its hash reads all of its constants."""
        self._leaving: dict[FrameType, _Leaving] = {}

    def find_branches(self, loader: Any) -> None:
        """Watch for branches around the lines at which the script's frames stand now.

        Args:
            loader: over which the innermost loop runs.
        """
        frames = list(script_frames(sys._getframe(1)))  # noqa: SLF001 - who asks is the question
        for frame in frames:
            node = function_of(frame.f_code)
            if node is None:
                continue
            found = branches_in(node, loops_around(node, frame.f_lineno), Path(frame.f_code.co_filename).name)
            possible = {at: one for at, one in found.items() if may_come(one, frame, loader)}
            if possible:
                self._watched[id(frame.f_code)] = _Watched(frame.f_code, possible)
        self.watch(frames)

    @property
    def pending(self) -> list[Branch]:
        """Branches whose tests were reached and that have not come yet."""
        return [
            one
            for watched in self._watched.values()
            for one in watched.branches.values()
            if one.node.lineno in watched.ran and one.node.body[0].lineno not in watched.ran
        ]

    def watch(self, frames: Sequence[FrameType]) -> None:
        """Watch the lines of these frames from here on, and of functions in which branches were found."""
        if self._leaving or self._watched:
            sys.settrace(self._of_calls())
            for frame in frames:
                frame.f_trace = self._line

    def rest(self) -> None:
        """Watch no longer than until the loops that are to end have ended."""
        self.enters = False
        if not self._leaving:
            sys.settrace(None)

    def leave(self, asking: Asker, left: Callable[[bool], None]) -> None:
        """End the loops of an asker at the next round of the outermost one.

        Args:
            asking: in whose frame.
            left: called then; with False where the loop cannot be ended.
        """
        node = function_of(asking.frame.f_code)
        if node is not None:
            self._leave(asking.frame, node, asking.loops[0], left)

    def _leave(self, frame: FrameType, node: ast.AST, loop: Loop, left: Callable[[bool], None]) -> bool:
        """End a loop at its next round; False where nothing of the function comes after it."""
        counted = counted_rounds(frame, loop.lineno)
        if counted is not None:
            counted.left = left
            return True
        if line_after(node, loop) is None:
            return False
        self._leaving[frame] = _Leaving(node, loop, left, frame.f_lineno)
        self.watch([frame])
        return True

    def leave_epochs(self, asking: Asker | None, left: Callable[[bool], None]) -> bool:
        """End the outermost loop at which the script stands, at its next round; False where none can be ended.

        Args:
            asking: the script called ``next`` for its latest batch there: that loop ends, too.
            left: called then; with False where a loop cannot be ended.
        """
        for frame in reversed(list(script_frames(sys._getframe(1)))):  # noqa: SLF001 - where it stands is the question
            node = function_of(frame.f_code)
            for loop in () if node is None else loops_around(node, frame.f_lineno):
                if node is not None and self._leave(frame, node, loop, left):
                    if asking is not None and asking.loops and asking.loops[0] is not loop:
                        self.leave(asking, left)
                    return True
        return False

    def _of_calls(self) -> Callable[[FrameType, str, Any], Callable[..., Any] | None]:
        """What is called at every call of a function: with nothing to look up that can be known before."""
        watched, line = self._watched, self._line
        return lambda frame, _event, _given: line if id(frame.f_code) in watched else None

    def _line(self, frame: FrameType, event: str, _given: Any) -> Callable[..., Any]:
        if event != "line":
            return self._line
        line = frame.f_lineno
        leaving = self._leaving.get(frame)
        if leaving is not None and begins_round(leaving.loop, line, leaving.before):
            del self._leaving[frame]
            if not self._leaving and not self.enters:
                sys.settrace(None)
            leaving.left(_jump(frame, line_after(leaving.node, leaving.loop)))
        elif leaving is not None:
            leaving.before = line
        watched = self._watched.get(id(frame.f_code))
        if watched is not None:
            branch = watched.branches.get(line)
            if self.enters and branch is not None and branch.node.body[0].lineno not in watched.ran:
                self._enter(branch, frame, watched)
            watched.ran.add(frame.f_lineno)
        return self._line

    def _enter(self, branch: Branch, frame: FrameType, watched: _Watched) -> None:
        period, comes = period_of(branch, frame), comes_besides(branch, frame)
        if period is not None and comes and _jump(frame, branch.node.body[0].lineno):
            self._entered(branch, period)
        elif comes is False:  # what else it tests does not hold
            watched.ran.add(branch.node.body[0].lineno)


def forget_locals() -> None:
    """Let go of what watched frames below here held when their local variables were last asked for.

    Before Python 3.13 a frame answers with a dictionary that it keeps, with the values of that moment: tensors that the
    script has let go of long since would stay on the simulated GPU.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - who stands below is the question
    while frame is not None:
        # Of modules and classes, the dictionary is where the variables are.
        if frame.f_trace is not None and frame.f_code.co_flags & CO_OPTIMIZED:
            if type(frame.f_locals) is dict:
                frame.f_locals.clear()
            if sys.gettrace() is None:
                frame.f_trace = None
        frame = frame.f_back


def _jump(frame: FrameType, line: int | None) -> bool:
    """Go on at another line; False where that cannot be done."""
    if line is None or line == frame.f_lineno:
        return False
    try:
        setattr(frame, "f_lineno", line)  # noqa: B010 - typeshed has it read-only
    except ValueError:  # into another block
        return False
    return True
