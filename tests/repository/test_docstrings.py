"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest
from each import each

ROOT = Path(__file__).parents[2]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Public names of each, besides those that are no objects with a docstring.
PUBLIC = {
    "vram_guard": {"__version__"},
    "vram_guard_lightning": set(),
    "vram_guard_mmengine": set(),
    "vram_guard_accelerate": set(),
}
#: Every public function, class and method of these has an example too, properties apart.
THROUGHOUT = ("vram_guard.units", "vram_guard.closed_form.calculator")


def modules_with_examples():
    """Names of modules whose sources show a prompt."""
    for folder in (ROOT, ROOT / "integrations"):
        for path in sorted(folder.glob("vram_guard*/**/*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def examples_of(thing, name, module):
    """The examples of an object and its methods; they may use torch and vram_guard's public names."""
    import torch

    import vram_guard

    names = {public: getattr(vram_guard, public) for public in vram_guard.__all__}
    known = {**names, "torch": torch, **vars(module)}
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, name, module=module, globs=known)
    return [one for one in found if one.examples]


@pytest.mark.parametrize("name", [*modules_with_examples()])
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_examples_run(name, tmp_path, monkeypatch):
    for framework in ("lightning", "mmengine", "accelerate"):
        if name.startswith(f"vram_guard_{framework}"):
            pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    module = import_module(name)
    found = examples_of(module, name, module)
    assert found
    report: list[str] = []
    for one in found:
        doctest.DocTestRunner(optionflags=OPTIONS).run(one, out=report.append)
    assert not report, "\n".join(report)


@pytest.mark.parametrize("package", PUBLIC)
@pytest.mark.filterwarnings("ignore")
def test_every_public_name_has_an_example(package):
    if package != "vram_guard":
        pytest.importorskip(package.removeprefix("vram_guard_"))
    public = import_module(package)
    names = [name for name in public.__all__ if name not in PUBLIC[package]]
    assert names
    for name in names:
        thing = getattr(public, name)
        module = import_module(thing.__module__)
        assert examples_of(thing, name, module), f"{package}.{name} ({module.__name__}) has no example that runs"


@each("name", THROUGHOUT)
def test_every_public_function_of_these_has_an_example(name):
    module = import_module(name)
    shown = {one.name for one in examples_of(module, name, module)}
    public = [
        thing
        for own_name, thing in vars(module).items()
        if not own_name.startswith("_") and getattr(thing, "__module__", "") == name
    ]
    assert public
    for thing in public:
        assert f"{name}.{thing.__qualname__}" in shown, f"{thing.__qualname__} has no example"
        if inspect.isclass(thing):
            methods = [method for key, method in vars(thing).items() if not key.startswith("_")]
            for method in methods:
                function = getattr(method, "__func__", method)
                if inspect.isfunction(function):
                    assert f"{name}.{function.__qualname__}" in shown, f"{function.__qualname__} has no example"


def test_an_example_that_is_wrong_is_seen(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('"""Adds.\n\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("wrong_example")
    report: list[str] = []
    for one in examples_of(module, "wrong_example", module):
        doctest.DocTestRunner(optionflags=OPTIONS).run(one, out=report.append)
    assert "Expected:\n    3\nGot:\n    2" in "".join(report)
