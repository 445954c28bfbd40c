"""The way that a program goes by a truth value that nobody knows: one on which it neither stops nor repeats for ever.

A check that raises (``assert``, ``if not ...: raise``, those of ``torch.distributions``) holds in every training that
goes on. So the bytecode behind a question is followed, with each answer: an answer after which every path ends in an
exception is not given where the other one has a path that goes on. In a ``while`` loop that a value would end, the
other answer is given once the loop has run a few rounds and takes no more memory from round to round.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from vram_guard.language import Message
from vram_guard.limits import EQUAL_ROUNDS, GROWING_ROUNDS
from vram_guard.simulate.memory.recorder import Recorder

#: Frames of this package, and those through which torch hands a call on to modes.
_PASSED = (
    f"{Path(__file__).parents[2]}{os.sep}",
    *(str(Path(torch.__file__).parent / name) for name in ("overrides.py", "utils/_device.py", "_tensor.py")),
)
_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE"})
_KEEPS = frozenset({"NOP", "RESUME", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "TO_BOOL"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMPING = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})


class _Path(NamedTuple):
    """A place that the program may come to."""

    at: int
    """The instruction, by its number."""
    top: bool | None
    """What lies on top of the stack, if it is made of the answer alone."""
    under: bool | None = None
    """The same of what lies under it."""
    variables: frozenset[tuple[str, bool]] = frozenset()
    """Local variables that hold such a value."""
    bounded: bool = False
    """Whether the path has asked an iterator, which ends."""


class _Ends(NamedTuple):
    """How the paths that follow an answer end, but for those that raise."""

    goes_on: bool
    loops: bool
    """Whether one comes back to the question, in a loop that no iterator bounds."""


def chosen(recorder: Recorder, default: bool, frame: FrameType | None = None, said: object = None) -> bool:
    """The truth of a value that is not known, with a note that says what was taken.

    Args:
        recorder: of the trace.
        default: the answer where the program goes on with either.
        frame: that asked; None: the innermost one outside this package.
        said: what the default comes from; None: it is the value itself.
    """
    asking = frame or _asking()
    ends, others = _ends(asking, default), _ends(asking, not default)
    if ends.goes_on != others.goes_on:
        answer = default if ends.goes_on else not default
        recorder.note(
            Message(
                "the step checks a computed value, which is not known before training, and goes on only if the "
                "answer is {answer}: assumed to be so",
                answer=str(answer),
            )
        )
        return answer
    if ends.loops and _is_round_enough(recorder, asking):
        default, said = not default, None
    recorder.note(
        Message(
            "the step branches on a computed value, which is not known before training: assumed to be {answer}",
            answer=str(default if said is None else said),
        ),
        tier="partly symbolic",
    )
    return default


def _is_round_enough(recorder: Recorder, asking: FrameType | None) -> bool:
    """True if a loop has asked for long enough in this phase; it then begins to count anew."""
    question = (id(asking.f_code), asking.f_lineno) if asking is not None else (0, 0)
    allocated = recorder.allocated
    before, equal, rounds = recorder.asked.get(question, (-1, 0, 0))
    equal = equal + 1 if before == allocated else 0
    enough = equal >= EQUAL_ROUNDS or rounds >= GROWING_ROUNDS
    recorder.asked[question] = (allocated, 0, 0) if enough else (allocated, equal, rounds + 1)
    return enough


def _asking() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return frame


def _ends(frame: FrameType | None, answer: bool) -> _Ends:
    """How the program goes on from where a frame stands: where it asks, or at the call that returned the answer."""
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    if frame is None:
        return _Ends(goes_on=True, loops=False)
    here, returned = _ends_in(frame.f_code, frame.f_lasti, answer)
    found = [here, *(_ends(frame.f_back, value) for value in returned)]
    return _Ends(any(one.goes_on for one in found), any(one.loops for one in found))


@functools.lru_cache(maxsize=1024)
def _ends_in(code: CodeType, offset: int, answer: bool) -> tuple[_Ends, frozenset[bool]]:
    """The same in one function, and what it may return where that is made of the answer alone."""
    instructions, positions = _instructions(code)
    start = bisect_right(instructions, offset, key=lambda one: one.offset) - 1  # in a call, it is that of a cache entry
    asked = instructions[start].opname in ("TO_BOOL", "UNARY_NOT") or _by_truth(instructions[start])
    called = instructions[start].opname == "PRECALL"  # of Python 3.11, which may do the work of CALL behind it
    copied = asked and _copies(instructions[start - 1])  # of ``a and b``, where ``a`` is the value
    pending = [_Path(start if asked else start + 1 + called, answer, answer if copied else None)]
    seen: set[_Path] = set()
    returned: set[bool] = set()
    goes_on = loops = False
    while pending:
        path = pending.pop()
        if path in seen or path.at >= len(instructions):
            continue
        if path.at == start and (seen or not asked):
            goes_on = True
            loops |= not path.bounded
            continue
        seen.add(path)
        name = instructions[path.at].opname
        if name in ("RETURN_VALUE", "YIELD_VALUE") and path.top is not None:
            returned.add(path.top)
        elif name in _RETURNS:
            goes_on = True
        elif name not in _RAISES:
            pending += _followed(instructions[path.at], path, positions)
    return _Ends(goes_on, loops), frozenset(returned)


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    found = list(dis.get_instructions(code))
    return found, {instruction.offset: at for at, instruction in enumerate(found)}


def _copies(instruction: dis.Instruction) -> bool:
    return instruction.opname == "COPY" and instruction.arg == 1


def _by_truth(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and instruction.opname.endswith(("TRUE", "FALSE", "OR_POP"))


def _followed(instruction: dis.Instruction, path: _Path, positions: dict[int, int]) -> list[_Path]:
    """Where the program may go from an instruction."""
    name, argument = instruction.opname, instruction.argval
    following = path._replace(at=path.at + 1)
    unknown = following._replace(top=None, under=None)
    if name in _KEEPS:
        return [following]
    if name == "UNARY_NOT":
        return [following._replace(top=None if path.top is None else not path.top)]
    if _copies(instruction):
        return [following._replace(under=path.top)]
    if name in _LOADS:
        return [unknown._replace(top=dict(path.variables).get(argument))]
    if name.startswith("STORE_FAST"):
        written = argument if isinstance(argument, tuple) else (argument,)
        kept = frozenset(one for one in path.variables if one[0] not in written)
        if name == "STORE_FAST" and path.top is not None:
            kept |= {(argument, path.top)}
        return [unknown._replace(variables=kept)]
    target = positions.get(argument) if instruction.opcode in _JUMPING and not name.startswith("SETUP_") else None
    if target is None:
        return [unknown]
    if _by_truth(instruction):
        left = path._replace(top=path.under, under=None)
        jumped = (path if "OR_POP" in name else left)._replace(at=target)
        passed = left._replace(at=path.at + 1)
        if path.top is None:
            return [jumped, passed]
        return [jumped if path.top == ("TRUE" in name) else passed]
    if name in _JUMPS:
        return [path._replace(at=target)]
    bounded = path.bounded or name == "FOR_ITER"
    return [unknown._replace(at=target), unknown._replace(bounded=bounded)]
