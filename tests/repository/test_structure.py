"""Imports point one way: no cycles, the core knows no adapter, and underscore modules stay inside their package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from import_graph import Graph, is_within, private_part

ROOT = Path(__file__).parents[2]
ADAPTERS = sorted(path.name for path in (ROOT / "integrations").iterdir() if (path / "__init__.py").exists())


@pytest.fixture(scope="module")
def graph():
    return Graph.of(ROOT / "vram_guard", *(ROOT / "integrations" / name for name in ADAPTERS), ROOT / "benchmarks")


def told(graph, root=ROOT):
    """Each cycle as its imports, one a line."""
    return [
        "\n".join([f"{len({each.importer for each in cycle})} modules import each other:", *map(str, cycle)]).replace(
            f"{root}/", ""
        )
        for cycle in graph.cycles()
    ]


def foreign_imports(graph):
    """Imports of underscore modules from outside of their package; its public names may be defined in them."""
    return [
        str(each)
        for each in graph.imports
        if (package := private_part(each.imported)) is not None and not is_within(each.importer, package)
        if not re.fullmatch(rf"from {re.escape(package)} import [A-Za-z]\w*(, [A-Za-z]\w*)*", each.written)
    ]


def test_the_graph_is_that_of_the_sources(graph):
    """As a check of the checks below: all packages are there, with the imports that one would look for by hand."""
    assert len(ADAPTERS) == 3
    assert {name.partition(".")[0] for name in graph.modules} == {"vram_guard", "benchmarks", *ADAPTERS}
    edges = graph.edges
    assert "vram_guard.errors" in edges["vram_guard.language"]
    assert "vram_guard.timeline" in edges["vram_guard"]  # for types
    for name in ADAPTERS:
        targets = {target for source, found in edges.items() if is_within(source, name) for target in found}
        assert any(is_within(target, "vram_guard") for target in targets), name
    assert "benchmarks.harness.records" in edges["benchmarks.published.source"]
    assert graph.modules["vram_guard"].lazy["TrainingStep"] == "vram_guard.step"
    assert sum(len(targets) for targets in edges.values()) > 500


def test_no_modules_import_each_other(graph):
    cycles = told(graph)
    assert not cycles, f"{len(cycles)} cycles\n\n" + "\n\n".join(cycles)


def test_the_core_imports_no_adapter_and_no_benchmark(graph):
    others = [*ADAPTERS, "benchmarks"]
    wrong = [
        str(each)
        for each in graph.imports
        if is_within(each.importer, "vram_guard") and any(is_within(each.imported, other) for other in others)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_adapter_is_imported_by_itself_only(graph):
    """A benchmark may, as a user's script does: the public names, from the adapter's own ``__init__``."""
    wrong = [
        str(each)
        for each in graph.imports
        for adapter in ADAPTERS
        if is_within(each.imported, adapter) and not is_within(each.importer, adapter)
        if not (is_within(each.importer, "benchmarks") and each.written.startswith(f"from {adapter} import"))
    ]
    assert not wrong, "\n".join(wrong)


def test_underscore_modules_are_imported_within_their_package_only(graph):
    wrong = foreign_imports(graph)
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_have_one_name():
    """A name that is read in a traceback or a message belongs to one idea."""
    places = defaultdict(list)
    for folder in ("vram_guard", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert len(places) > 500
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in twice.items())


def write(root, **sources):
    """A package at ``root``; ``__`` in a name is a folder's edge, ``init`` the package's own file."""
    for name, source in sources.items():
        path = root / f"{name.replace('__', '/').replace('init', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return Graph.of(root)


def test_a_straight_package_has_no_cycle(tmp_path):
    graph = write(tmp_path / "pkg", init="from pkg.a import x\n", a="from pkg import b\n", b="import os\nx = 1\n")
    assert graph.edges == {"pkg": ["pkg.a"], "pkg.a": ["pkg.b"], "pkg.b": []}
    assert not graph.cycles()


@pytest.mark.parametrize(
    "back",
    [
        "from pkg.a import x\n",
        "def f():\n    from pkg.a import x\n    return x\n",
        "class C:\n    def f(self):\n        import pkg.a as other\n        return other\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import X\n",
        "from pkg import a\n",
        "from . import a\n",
        "from .a import x\n",
        "from importlib import import_module\ndef f():\n    return import_module('pkg.a')\n",
        "def f():\n    from pkg import x\n    return x\n",  # lazily from pkg.a
    ],
    ids=["top", "function", "method", "types", "submodule", "relative", "relative name", "by name", "lazy"],
)
def test_a_cycle_is_found(tmp_path, back):
    init = "if TYPE_CHECKING:\n    from pkg.a import x\ndef __getattr__(name): ...\n"
    graph = write(tmp_path / "pkg", init=init, a="import pkg.b\nx = 1\n", b=back, c="import pkg.a\n")
    (cycle,) = told(graph, tmp_path)
    assert cycle.startswith("2 modules import each other:")
    assert "pkg/a.py:1: pkg.a imports pkg.b (import pkg.b)" in cycle
    assert "pkg.b imports pkg.a (" in cycle
    assert "pkg/c.py" not in cycle
    assert "__init__" not in cycle


def test_two_cycles_are_two(tmp_path):
    graph = write(
        tmp_path / "pkg",
        a="import pkg.b\n",
        b="import pkg.c\n",
        c="import pkg.a\nimport pkg.d\n",
        d="def f():\n    import pkg.e\n",
        e="import pkg.d\n",
    )
    assert [len({each.importer for each in cycle}) for cycle in graph.cycles()] == [2, 3]


def test_what_a_package_re_exports_is_imported_through_it(tmp_path):
    """A module that asks its own package's ``__init__`` for a name which that takes from the module's importers."""
    graph = write(tmp_path / "pkg", init="from pkg.a import x\n", a="from pkg.b import x\n", b="from pkg import x\n")
    assert len(graph.cycles()) == 1


def test_an_underscore_module_imported_from_elsewhere_is_found(tmp_path):
    graph = write(
        tmp_path / "pkg",
        room__init="from pkg.room._inner import x\n",
        room___inner="x = 1\n",
        room__deep__far="from pkg.room._inner import x\n",
        _top="x = 1\n",
        other="def f():\n    from pkg.room._inner import x\n    from pkg import _top\n",
        __main__="import pkg.other\n",
        _hidden__part="x = 1\n",
    )
    found = foreign_imports(graph)
    assert len(found) == 1
    assert "pkg.other imports pkg.room._inner" in found[0]
    assert private_part("pkg._hidden.part") == private_part("pkg._top") == "pkg"
    assert private_part("pkg.__main__") is None
