"""What a script calls after the line at which it stands: ``trainer.test(...)`` after ``trainer.fit(...)``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

from vram_guard.user_code import is_users_file


def later_calls(*wanted: str) -> frozenset[str]:
    """Those of some methods that the script's functions call below the lines at which they stand now.

    Only calls that come for certain once those lines are over: those of another branch, and of one that is not entered
    yet, are left out. Nothing is known of code that has no file.

    Args:
        wanted: names of the methods.

    Example:
        >>> def script():
        ...     return later_calls("never_called")
        >>> script()
        frozenset()
    """
    names: set[str] = set()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - where the script stands is the question
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            names.update(_called_after(file, frame.f_code.co_name, frame.f_lineno, wanted))
        frame = frame.f_back
    return frozenset(names.intersection(wanted))


@lru_cache(maxsize=64)
def _called_after(file: str, function: str, line: int, wanted: tuple[str, ...]) -> frozenset[str]:
    try:
        text = Path(file).read_bytes()
        # Most scripts name none of them, and parsing a long one takes as long as a small trace.
        if not re.search(rb"\b(%s)\b" % b"|".join(map(str.encode, wanted)), b"\n".join(text.split(b"\n")[line:])):
            return frozenset()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(name for body in _bodies(_scope(tree, function, line), line) for name in _methods(body, line))


def _scope(tree: ast.Module, function: str, line: int) -> ast.AST:
    """The function that stands at a line; the module for its own code."""
    if function == "<module>":
        return tree
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function and _holds(node, line)
    ]
    return max(found, key=lambda node: node.lineno, default=ast.Module(body=[], type_ignores=[]))


def _holds(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _bodies(scope: ast.AST, line: int) -> Iterator[list[ast.stmt]]:
    """The lists of statements around a line, outermost first."""
    inner: ast.AST | None = scope
    while inner is not None:
        around = None
        for name in ("body", "orelse", "finalbody"):
            body = getattr(inner, name, None)
            if isinstance(body, list) and (found := next((one for one in body if _holds(one, line)), None)) is not None:
                yield body
                around = found
        inner = around


def _methods(body: list[ast.stmt], line: int) -> Iterator[str]:
    for statement in body:
        if statement.lineno > line and not isinstance(statement, (ast.If, ast.For, ast.While, ast.Try, *_DEFINITIONS)):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield node.func.attr


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
