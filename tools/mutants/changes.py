"""The small changes that can be made to a room's files, and the statements in which they stand."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

#: Line and column of a statement, or of a lambda function, whose own expressions run at another time.
Place: TypeAlias = tuple[int, int]
#: Arguments that refuse what correct code never does (zip's and dataclass's), or say which line a warning names.
CHECKS_OF_OUR_OWN = ("strict", "frozen", "slots", "stacklevel")
#: Operators, and their replacements.
PAIRS = {"Lt": "LtE", "Gt": "GtE", "Eq": "NotEq", "Is": "IsNot", "In": "NotIn", "And": "Or", "Add": "Sub"}
ONE_WAY = {"Mult": "FloorDiv", "FloorDiv": "Mult", "Div": "Mult", "Mod": "Mult", "Pow": "Mult"}
SWAPS = {
    getattr(ast, before): getattr(ast, after)
    for before, after in [*PAIRS.items(), *((after, before) for before, after in PAIRS.items()), *ONE_WAY.items()]
}


@dataclass
class Mutant:
    """One change: the text of a node, and what stands there instead."""

    room: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    statement: int
    """The number of the innermost statement around it, among all of the room's."""
    verdict: str = ""
    seconds: float = 0.0
    killed_by: str = ""

    def __str__(self) -> str:
        by = f"  by {self.killed_by}" if self.killed_by else ""
        return f"{self.verdict:9} {self.file}:{self.line}: {self.before}  ->  {self.after}{by}"


def changes(node: ast.AST) -> Iterator[str]:
    """The nodes that may replace a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPS:
            yield f"({ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], [right]))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            if not any(isinstance(getattr(one, "value", None), str) for one in (left, right)):  # joins texts
                yield f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (repr(value + 1), repr(value - 1))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"


def nodes(tree: ast.AST, place: Place = (0, 0)) -> Iterator[tuple[ast.AST, Place]]:
    """Nodes that run, each with the place of the innermost statement around it.

    No annotations, nothing for type checkers, nothing inside f-strings (they have no own place).
    """
    if isinstance(tree, ast.keyword) and tree.arg in CHECKS_OF_OUR_OWN:
        return
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or (
            isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                around = (child.lineno, child.col_offset) if isinstance(child, (ast.stmt, ast.Lambda)) else place
                yield child, around
                yield from nodes(child, around)


def files_of(root: Path, room: str) -> list[Path]:
    """The Python files of a room, a folder or a file itself."""
    return [root / room] if room.endswith(".py") else sorted((root / room).rglob("*.py"))


def statements(tree: ast.AST) -> list[ast.stmt | ast.Lambda]:
    """Every statement and lambda function; their numbers are their positions here."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.Lambda))]


def mutants_of(root: Path, room: str) -> list[Mutant]:
    """Every change of a room, in the order of its files."""
    found = []
    first = 0
    for path in files_of(root, room):
        source = path.read_bytes()
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        tree = ast.parse(source)
        numbers = {(node.lineno, node.col_offset): first + i for i, node in enumerate(statements(tree))}
        first += len(statements(tree))
        for node, place in nodes(tree):
            if not isinstance(node, (ast.expr, ast.stmt)) or node.end_lineno is None or node.end_col_offset is None:
                continue  # it has no text of its own
            for after in changes(node):
                span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
                before = source[slice(*span)].decode()
                name = str(path.relative_to(root))
                found.append(Mutant(room, name, node.lineno, *span, before, after, numbers[place]))
    return found
