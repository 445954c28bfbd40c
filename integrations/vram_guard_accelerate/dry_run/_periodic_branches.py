"""Branches of a script that come every so many rounds of a loop: ``if step % 500 == 0``."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vram_guard_accelerate.dry_run._script_source import Loop, inside, loops_around


@dataclass(frozen=True)
class Branch:
    """A branch of the script that comes every so many rounds of a loop."""

    node: ast.If
    loops: tuple[Loop, ...]
    """Around it, outermost first."""
    where: str
    """Its file and line."""


def _rounds(loop: Loop, frame: FrameType) -> int | None:
    """Of a loop over ``range``."""
    of = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(of, ast.Call) or ast.unparse(of.func) != "range":
        return None
    given = [_value(one, frame) for one in of.args]
    return len(range(*given)) if all(isinstance(one, int) for one in given) else None


def branches_in(node: ast.AST, loops: Sequence[Loop], file: str) -> dict[int, Branch]:
    """Branches inside the outermost loop of which a test says how often they come, by line."""
    if not loops:
        return {}
    found = {}
    for one in inside(loops[0]):
        if not isinstance(one, ast.If) or isinstance(one.body[0], (ast.Break, ast.Continue, ast.Return, ast.Raise)):
            continue
        if any(_periodic(part) for part in ast.walk(one.test)):
            around = tuple(loops_around(node, one.lineno))
            if set(around) <= set(loops):  # a loop beside the training's has rounds of its own
                found[one.lineno] = Branch(one, around, f"{file}, line {one.lineno}")
    return found


def _periodic(test: ast.AST) -> bool:
    """True for ``a % b == c`` and ``not a % b``."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.Eq) and _modulo(test.left) is not None
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _modulo(test.operand) is not None


def _modulo(part: ast.AST) -> ast.BinOp | None:
    return part if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) else None


def _modulos(test: ast.AST) -> Iterator[ast.BinOp]:
    for part in ast.walk(test):
        if _periodic(part):
            yield from (one for one in map(_modulo, ast.walk(part)) if one is not None)


def period_of(branch: Branch, frame: FrameType) -> int | None:
    """Rounds from one time to the next, as the frame has them; None where that cannot be told."""
    found = [_value(one.right, frame) for one in _modulos(branch.node.test)]
    known = [one for one in found if isinstance(one, int) and one > 0]
    return max(known) if known and len(known) == len(found) else None


def may_come(branch: Branch, frame: FrameType, loader: Any) -> bool:
    """False where the loops around a branch have fewer rounds than its period, or end before it, as far as is known."""
    period = period_of(branch, frame)
    if period is None:
        return True  # it may be known where the branch is reached
    rounds: list[float] = []
    for loop in branch.loops:
        known = _rounds(loop, frame)
        if known is None and loop is branch.loops[-1] and len(branch.loops) > 1:
            try:
                known = len(loader)
            except TypeError:
                known = None
        rounds.append(math.inf if known is None else known)
    limits = [_value(limit, frame) for limit in _limits(branch)]
    return period <= min([math.prod(rounds), *(one for one in limits if isinstance(one, (int, float)))])


def _limits(branch: Branch) -> Iterator[ast.expr]:
    """Those at which a loop around a branch is left (``if step >= limit: break``), for the number that it counts by."""
    counted = {ast.unparse(one.left) for one in _modulos(branch.node.test)}
    for one in inside(branch.loops[0]):
        test = one.test if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break) else None
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.GtE, ast.Gt, ast.Eq)):
            continue
        if ast.unparse(test.left) in counted:
            yield test.comparators[0]


class _EveryTime(ast.NodeTransformer):
    """The test of a branch as it is in a round in which the branch comes."""

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(ast.Constant(value=True), node) if _periodic(node) else self.generic_visit(node)


def comes_besides(branch: Branch, frame: FrameType) -> bool | None:
    """Whether what else a branch tests holds; None where that cannot be told."""
    value = _value(_EveryTime().visit(ast.parse(ast.unparse(branch.node.test), mode="eval").body), frame)
    return None if value is None else bool(value)


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Of an expression in a frame; None where it has none."""
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<script>", "eval")
    try:
        return eval(code, frame.f_globals, dict(frame.f_locals))  # noqa: S307 - the script's own expression
    except Exception:  # noqa: BLE001 - it is the script's: anything may go wrong
        return None
