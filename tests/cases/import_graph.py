"""The import graph of Python packages, read from their sources: nothing is imported.

Counted are imports at module level, in functions, and under ``if TYPE_CHECKING``; calls of ``import_module`` with a
literal name too. Python runs the ``__init__`` of every package above a module that is imported; that is no edge here,
because such an ``__init__`` only re-exports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import: the module that has it, the module it reaches, and how and where it is written."""

    importer: str
    imported: str
    written: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported} ({self.written})"


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lazy(self) -> dict[str, str]:
        """Names that an ``__init__`` gives on first use, with their modules.

        It has a ``__getattr__`` (PEP 562), and tells type checkers by ``if TYPE_CHECKING`` where the names come from.
        """
        body = self.tree.body
        if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body):
            return {}
        return {
            alias.asname or alias.name: source_of(self, node)
            for block in body
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


@dataclass
class Graph:
    """Modules by name, and the imports between them."""

    modules: dict[str, Module]
    imports: list[Import] = field(default_factory=list)

    @classmethod
    def of(cls, *roots: Path) -> Graph:
        """The graph of the packages in these folders; a module's name starts with its root's."""
        graph = cls({module.name: module for root in roots for module in modules_of(root)})
        graph.imports += dict.fromkeys(each for module in graph.modules.values() for each in graph.imports_of(module))
        return graph

    def imports_of(self, module: Module) -> Iterable[Import]:
        for node in ast.walk(module.tree):
            for source, name in imported_names(module, node):
                found = self.resolved(module, source, name)
                if found and found != module.name:
                    yield Import(module.name, found, ast.unparse(node), module.path, node.lineno)

    def resolved(self, importer: Module, source: str, name: str | None) -> str | None:
        """The module that ``from source import name`` (name None: ``import source``) reaches; None: outside."""
        if source not in self.modules and not (importer.path.parent / "__init__.py").exists():
            source = f"{importer.package}.{source}"  # a script imports the scripts beside it
        if name and f"{source}.{name}" in self.modules:
            return f"{source}.{name}"
        found = self.modules.get(source)
        if found is None:
            return None
        return found.lazy.get(name, found.name) if name and importer is not found else found.name

    def cycles(self) -> list[list[Import]]:
        """The imports within each strongly connected component of several modules, the smallest component first."""
        component = {name: number for number, names in enumerate(components(self.edges)) for name in names}
        inside: dict[int, list[Import]] = {}
        for each in self.imports:
            if component[each.importer] == component[each.imported]:
                inside.setdefault(component[each.importer], []).append(each)
        return sorted(inside.values(), key=len)

    @property
    def edges(self) -> dict[str, list[str]]:
        edges: dict[str, list[str]] = {name: [] for name in self.modules}
        for each in self.imports:
            edges[each.importer].append(each.imported)
        return edges


def modules_of(root: Path) -> Iterable[Module]:
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def source_of(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name after ``from``."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def imported_names(module: Module, node: ast.AST) -> Iterable[tuple[str, str | None]]:
    """What one statement or call imports: (module, name in it or None)."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((source_of(module, node), alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, None


def components(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components (R. Tarjan, SIAM J. Comput. 1(2), 1972), with a stack of its own."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    for start in edges:
        work = [] if start in order else [(start, iter(edges[start]))]
        while work:
            name, targets = work[-1]
            if name not in order:
                order[name] = low[name] = len(order)
                open_.append(name)
            for target in targets:
                if target not in order:
                    work.append((target, iter(edges[target])))
                    break
                if target in open_:
                    low[name] = min(low[name], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    at = open_.index(name)
                    found.append(open_[at:])
                    del open_[at:]
    return found


def private_part(name: str) -> str | None:
    """The package within which a module may be imported; None for a module that everybody may import.

    A module or folder whose name begins with an underscore belongs to the folder it stands in.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:at])
    return None


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
