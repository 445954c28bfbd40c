"""Importing the package and asking for help stay cheap: nothing heavy is imported until it is needed."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from each import each
from imported import heavy_after, imported_after

from vram_guard.quiet import quiet_imports


@each(
    "statement",
    [
        "import vram_guard",
        "import vram_guard.cli",
        "import vram_guard.pytest_plugin",
        "import vram_guard_lightning",
        "import vram_guard_mmengine",
        "import vram_guard_mmengine.commands",
        "from vram_guard import TrainingStep, Budget, Timeline, Estimate, Plan, AllocatorSettings, plan",
    ],
)
def test_import_is_light(statement: str) -> None:
    assert heavy_after(statement) == set()


@each("command", ["doctor", "gpus"])
def test_tables_need_what_draws_them_alone(command: str) -> None:
    assert heavy_after(f"from vram_guard.cli import main\nmain([{command!r}])") == {"rich"}


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A package that does import heavy things is caught, at its top level and behind a module of its own."""
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package" / "__init__.py").write_text("from heavy_package import inner\n")
    (tmp_path / "heavy_package" / "inner.py").write_text("import torch.nn\nimport rich.table\n")
    assert heavy_after("import heavy_package", tmp_path) >= {"torch", "rich"}


def test_help_imports_nothing_but_the_package_and_pythons_own_library() -> None:
    """Whatever else it imported, it would wait for."""
    statement = (
        "from vram_guard.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code"
    )
    others = imported_after(statement) - imported_after("") - sys.stdlib_module_names
    assert {name for name in others if not name.startswith("vram_guard")} == set()


def test_public_names_resolve_whatever_was_imported_first() -> None:
    """``vram_guard.plan`` is a package and a function: the function has the name, in either order."""
    then = "from vram_guard import plan\nassert plan.__name__ == 'plan' and callable(plan), plan"
    for first in ("import vram_guard.plan", "import vram_guard.plan.model", "import vram_guard"):
        assert heavy_after(f"{first}\n{then}") == set()


def test_every_public_name_is_there() -> None:
    import vram_guard

    for name in vram_guard.__all__:
        assert getattr(vram_guard, name) is not None
    assert set(vram_guard.__all__) <= set(dir(vram_guard))
    assert len(vram_guard.__all__) <= 15
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vram_guard.no_such_name


def test_libraries_are_imported_without_what_they_say_meanwhile(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    said = "import logging, warnings; logging.getLogger('talks').warning('log'); warnings.warn('warning')"
    (tmp_path / "talks.py").write_text(said)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as caught, quiet_imports():
        importlib.import_module("talks")
    assert (caught, caplog.messages) == ([], [])
    logging.getLogger("talks").warning("mine")
    assert caplog.messages == ["mine"]
