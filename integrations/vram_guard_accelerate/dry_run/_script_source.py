"""The source of a script's functions: loops around a line, and what stands in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias, TypeGuard

Loop: TypeAlias = ast.For | ast.While
_OwnScope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@lru_cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache
def function_of(code: CodeType) -> ast.AST | None:
    """The function of the source that this code is of; the whole module, for its own code."""
    tree = _tree(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """All that is in a function or a statement, but in functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _OwnScope):
            yield child
            yield from inside(child)


def is_next(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"


def loops_around(node: ast.AST, line: int) -> list[Loop]:
    """The loops of a function around a line, outermost first."""
    return [one for one in inside(node) if isinstance(one, (ast.For, ast.While)) and holds(one, line)]


def holds(loop: Loop, line: int) -> bool:
    return loop.lineno <= line <= (loop.end_lineno or 0)


def assigned_at(node: ast.AST, target: str) -> int | None:
    """The first line of a function that assigns to a target (its text); None: it is given to the function."""
    lines = [
        one.lineno
        for one in inside(node)
        if isinstance(one, ast.Assign)
        and any(
            ast.unparse(name) == target for made in one.targets for name in ast.walk(made) if isinstance(name, ast.expr)
        )
    ]
    return min(lines, default=None)


def line_after(node: ast.AST, statement: ast.stmt) -> int | None:
    """The line at which a function goes on after a loop that ends, or another statement.

    None where there is none, or a ``with`` or ``try`` ends there.
    """
    if isinstance(statement, (ast.For, ast.While)) and statement.orelse:
        return statement.orelse[0].lineno
    for parent in (node, *inside(node)):
        for name in ("body", "orelse"):
            found: Any = getattr(parent, name, None)
            body: list[ast.stmt] = found if isinstance(found, list) else []  # an expression has another `body`
            if statement in body:
                following = body[body.index(statement) + 1 :]
                if following:
                    return following[0].lineno
                if isinstance(parent, (ast.For, ast.While)) and name == "body":
                    return parent.lineno
                return line_after(node, parent) if isinstance(parent, (ast.If, ast.For, ast.While)) else None
    return None


def begins_round(loop: Loop, line: int, before: int) -> bool:
    """True if a loop's next round begins at a line.

    A ``while True:`` has no line of its own then: its first statement begins it, where that is not itself a loop that
    goes on.

    Args:
        loop: inside of which the function is.
        line: that is about to run.
        before: the one that ran before it.
    """
    if line == loop.lineno:
        return True
    first = loop.body[0]
    goes_on = isinstance(first, (ast.For, ast.While)) and first.lineno < before <= (first.end_lineno or 0)
    return isinstance(loop, ast.While) and line == first.lineno and not goes_on
