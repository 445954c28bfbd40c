"""The tool that makes small faults: what it changes, what it leaves alone, and how it judges."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = '''"""Adds 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 7


def grown(value: int = 3, *, least: "int | None" = None) -> int:
    """Never below 0."""
    if value < 0 or not least:
        raise ValueError(f"{value - 1}" + " is wrong")
    return value * 2


NUMBERED = list(zip([1, 2], "ab", strict=True))  # a check of our own is left alone
'''


@pytest.fixture
def tool(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_tool", module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_what_is_changed_and_what_is_not(tool, tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "some.py").write_text(SOURCE)
    found = tool.mutants_of("room")
    assert [(one.before, one.after) for one in found] == [
        ("3", "4"),
        ("3", "2"),
        ("value < 0 or not least", "(value < 0 and (not least))"),
        ("value < 0", "(value <= 0)"),
        ("0", "1"),
        ("0", "-1"),
        ("not least", "(least)"),
        ("return value * 2", "return None"),
        ("value * 2", "(value // 2)"),
        ("2", "3"),
        ("2", "1"),
        ("1", "2"),
        ("1", "0"),
        ("2", "3"),
        ("2", "1"),
    ]
    for one in found:
        assert SOURCE[one.start : one.end] == one.before
        compile(SOURCE[: one.start] + one.after + SOURCE[one.end :], "some.py", "exec")


def test_every_room_of_the_map_has_tests(tool):
    for room, patterns in tool.ROOMS.items():
        for pattern in patterns:
            assert list((ROOT / "tests").glob(f"{pattern}.py")), f"{room}: no test is called {pattern}"


def test_every_package_is_on_the_map(tool):
    packages = {f"vram_guard/{path.parent.name}" for path in (ROOT / "vram_guard").glob("*/__init__.py")}
    packages |= {f"integrations/{path.parent.name}" for path in (ROOT / "integrations").glob("*/__init__.py")}
    assert packages <= set(tool.ROOMS)


def test_verdicts(tmp_path):
    """A package with one function, of which a test looks at the sign only."""
    (tmp_path / "vram_guard").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mutants.py").write_text((ROOT / "tools" / "mutants.py").read_text())
    (tmp_path / "vram_guard" / "__init__.py").write_text("")
    (tmp_path / "vram_guard" / "pytest_plugin.py").write_text("")  # pytest loads the installed one's name
    (tmp_path / "vram_guard" / "units.py").write_text("def doubled(value):\n    return value * 2\n")
    (tmp_path / "tests" / "test_units.py").write_text(
        "from vram_guard.units import doubled\n\n\ndef test_doubled():\n    assert doubled(1) > 0\n"
    )
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    command = [sys.executable, str(tmp_path / "tools" / "mutants.py"), "units", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "vram_guard/units.py: {" in done.stdout
    assert "'killed': 2" in done.stdout  # None and 1 // 2 are not above 0
    assert "'survived': 2" in done.stdout  # 1 * 3 and 1 * 1 are
    assert "survived  vram_guard/units.py:2: 2  ->  3" in done.stdout
    for place, judged in (("units.py:2", True), ("units.py:1", False)):
        found = subprocess.run([*command, "--only", place], capture_output=True, text=True, check=False)
        assert found.returncode == judged, found.stdout + found.stderr
        assert ("survived" in found.stdout) == judged
