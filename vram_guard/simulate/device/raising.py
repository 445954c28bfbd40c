"""Calls of functions that do nothing but raise: helpers that make a check's error (``self._fail(...)``)."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from vram_guard.limits import CALLS_FOLLOWED

_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "CALL_FUNCTION_EX"})
_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLOSURE"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "YIELD_FROM", "SEND"})
_BEGUN_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MISSING = object()


class _CallSite(NamedTuple):
    offset: int
    name: str
    attributes: tuple[str, ...]


def raising_calls(frame: FrameType) -> frozenset[int]:
    """Offsets of the frame's calls of functions that never return."""
    calls = _calls(frame.f_code)
    if not calls:
        return frozenset()
    return _raising(calls, {**frame.f_globals, **_own(frame, {call.name for call in calls})}, 0)


def _own(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Local variables of these names; the frame is not left with references to its tensors."""
    found = frame.f_locals
    own = {name: found[name] for name in names if name in found}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict:
        found.clear()  # before Python 3.13 a copy that the frame keeps
    return own


def _raising(calls: tuple[_CallSite, ...], known: dict[str, Any], depth: int) -> frozenset[int]:
    return frozenset(call.offset for call in calls if _only_raises(*_called(call, known), depth))


def _called(call: _CallSite, known: dict[str, Any]) -> tuple[Any, Any]:
    """What is called, looked up without running any code, and the object whose attribute it is."""
    owner, value = None, known.get(call.name, _MISSING)
    for attribute in call.attributes:
        owner, value = value, inspect.getattr_static(value, attribute, _MISSING)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
    return value, owner


def _only_raises(function: Any, owner: Any, depth: int) -> bool:
    if not isinstance(function, FunctionType) or depth >= CALLS_FOLLOWED or function.__code__.co_flags & _BEGUN_LATER:
        return False
    code = function.__code__
    known = {**function.__globals__, **dict.fromkeys(code.co_varnames[: min(1, code.co_argcount)], owner)}
    raising = _raising(_calls(code), known, depth + 1)
    return not _returns(code, raising)


@functools.lru_cache(maxsize=1024)
def _returns(code: CodeType, raising: frozenset[int]) -> bool:
    """True if some path through the function comes to a return."""
    instructions = list(dis.get_instructions(code))
    places = {one.offset: at for at, one in enumerate(instructions)}
    jumping = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
    pending, seen = [0], set()
    while pending:
        at = pending.pop()
        if at in seen or at >= len(instructions):
            continue
        seen.add(at)
        one = instructions[at]
        if one.opname in _ENDS:
            return True
        if one.opname in ("RAISE_VARARGS", "RERAISE") or one.offset in raising:
            continue
        if one.opcode in jumping:
            pending.append(places.get(one.argval, at + 1))
        if not one.opname.startswith(("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")):
            pending.append(at + 1)
    return False


@functools.lru_cache(maxsize=256)
def _calls(code: CodeType) -> tuple[_CallSite, ...]:
    """Calls whose value is not used, of what a name leads to."""
    instructions = list(dis.get_instructions(code))
    found = []
    for at, one in enumerate(instructions[:-1]):
        if one.opname not in _CALLS or instructions[at + 1].opname not in ("POP_TOP", "RETURN_VALUE"):
            continue
        first = _first_of(instructions, at)
        if first is None or instructions[first].opname not in _NAMES:
            continue
        attributes, behind = [], first + 1
        while behind < at and instructions[behind].opname in _ATTRIBUTES:
            attributes.append(str(instructions[behind].argval))
            behind += 1
        found.append(_CallSite(one.offset, str(instructions[first].argval), tuple(attributes)))
    return tuple(found)


def _first_of(instructions: list[dis.Instruction], call: int) -> int | None:
    """The instruction that loads what a call calls: from there on, one value is put on the stack."""
    height = 0
    for at in range(call, -1, -1):
        one = instructions[at]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            return None  # of a choice among the arguments
        height += dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None)
        if height == 1:
            return at + (one.opname == "PUSH_NULL")
    return None
