"""Text in errors and warnings that does not go through the catalogues, found in syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Marks a message for the catalogues, or renders one.
CATALOGUED = {"_", "marked"}
#: Stands in every language.
OWN_NAME = "vram_guard"
WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Text:
    """A piece of text that a reader meets in English whatever the language."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}"


def parsed(*roots: Path) -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"), str(path))
        for root in roots
        for path in sorted(root.rglob("*.py"))
    }


def error_classes(trees: Iterable[ast.Module], base: str) -> set[str]:
    """Names of ``base`` and of every class that is derived from it, however indirectly."""
    bases = {
        node.name: {called(one) for one in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {base}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def called(node: ast.expr) -> str:
    """The last part of a name: "InvalidInputError" of ``errors.InvalidInputError``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def bare_texts(trees: Mapping[Path, ast.Module], errors: set[str]) -> Iterator[Text]:
    """Text in what errors and warnings are made of, outside of calls that look it up in the catalogues.

    Followed are joined and formatted texts, alternatives, and names that the same function or module gives a value to.
    What other functions and callers hand over is not: where they make an error of it, it is checked there.
    """
    for path, tree in trees.items():
        for call, around in messages(tree, errors):
            for argument in said_by(call):
                yield from (Text(path, line, text) for line, text in dict.fromkeys(Reader([tree, *around])(argument)))


def messages(tree: ast.Module, errors: set[str]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
    """Calls that make an error or warn, with the functions and classes around them from the outside in."""

    def visit(node: ast.AST, around: list[ast.AST]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and (
                called(child.func) in errors or warns(child) or own_init(child, around)
            ):
                yield child, around
            within = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from visit(child, [*around, child] if within else around)

    def own_init(call: ast.Call, around: list[ast.AST]) -> bool:
        inside = any(isinstance(one, ast.ClassDef) and one.name in errors for one in around)
        return inside and ast.unparse(call.func) == "super().__init__"

    yield from visit(tree, [])


def said_by(call: ast.Call) -> list[ast.expr]:
    """The arguments that a message is made of."""
    if warns(call):
        return call.args[:1]  # the others are the category and where to point
    if len(call.args) == 1:
        return call.args
    # Of several, those that are a single word name the part that the others are about, and are keys or paths.
    return [one for one in call.args if not is_word(one)]


def is_word(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) == 1


def warns(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "warnings.warn"


class Reader:
    """The bare text in an expression, as (line, text)."""

    def __init__(self, scopes: list[ast.AST]) -> None:
        self.scopes, self.seen = scopes, set()

    def __call__(self, node: ast.AST | None) -> Iterator[tuple[int, str]]:
        match node:
            case ast.Constant(value=str(text)):
                if WORD.search(text.replace(OWN_NAME, "")):
                    yield node.lineno, text
            case ast.Call(func=ast.Name(id=name)) if name in CATALOGUED:
                if not (
                    node.args and isinstance(node.args[0], ast.Constant | ast.Name | ast.Attribute | ast.Subscript)
                ):
                    yield node.lineno, ast.unparse(node)  # put together: no catalogue can have it
            case ast.Call(func=ast.Attribute(value=inner, attr="join" | "format" | "replace")):
                yield from self.all([inner, *node.args])
            case ast.JoinedStr() | ast.BoolOp():
                yield from self.all(node.values)
            case ast.FormattedValue() | ast.Starred() | ast.NamedExpr():
                yield from self(node.value)
            case ast.BinOp(op=ast.Add() | ast.Mod() | ast.Mult()):  # a path is put together by "/"
                yield from self.all([node.left, node.right])
            case ast.IfExp():
                yield from self.all([node.body, node.orelse])
            case ast.List() | ast.Tuple():  # single words are values and keys, which are the same in every language
                yield from (found for found in self.all(node.elts) if " " in found[1].strip())
            case ast.ListComp() | ast.GeneratorExp():
                yield from self(node.elt)
            case ast.Name(id=name) if name not in self.seen:
                self.seen.add(name)
                yield from self.all(self.values_of(name))

    def all(self, nodes: Iterable[ast.AST | None]) -> Iterator[tuple[int, str]]:
        for node in nodes:
            yield from self(node)

    def values_of(self, name: str) -> Iterator[ast.AST | None]:
        """Everything that the innermost scope which knows the name puts into it."""
        for scope in reversed(self.scopes):
            found = [value for node in nodes_of(scope) for value in put_into(node, name)]
            arguments = getattr(scope, "args", None)
            if found or (arguments and name in {one.arg for one in ast.walk(arguments) if isinstance(one, ast.arg)}):
                yield from found
                return


def nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function; of a module, those outside its functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not (isinstance(scope, ast.Module) and isinstance(child, ast.FunctionDef | ast.ClassDef)):
            yield from nodes_of(child)


def put_into(node: ast.AST, name: str) -> Iterator[ast.AST | None]:
    match node:
        case ast.Assign(targets=targets) if any(called(target) == name for target in targets):
            yield node.value
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            yield from (value for target, value in zip(names, values, strict=False) if called(target) == name)
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr() if called(node.target) == name:
            yield node.value
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="append" | "extend")) if owner == name:
            yield from node.args
