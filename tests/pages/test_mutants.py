"""The tool that makes small faults: what it changes, what it leaves alone, and how it judges."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"tools.mutants.{name}")


def test_what_is_changed_and_what_is_not(tool, tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "some.py").write_text(SOURCE)
    found = tool("changes").mutants_of(tmp_path, "room")
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
    for room, patterns in tool("rooms").ROOMS.items():
        for pattern in patterns:
            assert list((ROOT / "tests").rglob(f"{pattern}.py")), f"{room}: no test is called {pattern}"


def test_every_package_is_on_the_map(tool):
    packages = {f"vram_guard/{path.parent.name}" for path in (ROOT / "vram_guard").glob("*/__init__.py")}
    packages |= {f"integrations/{path.parent.name}" for path in (ROOT / "integrations").glob("*/__init__.py")}
    assert packages <= set(tool("rooms").ROOMS)


def test_marked_statements_do_what_they_did_and_say_so(tool, tmp_path):
    """Documentation, future imports, loops, handlers, lambda functions; an ``elif`` is a statement of its own."""
    source = '''"""Text."""

from __future__ import annotations

SMALLER = lambda value: value - 1


class Some:
    """Text."""

    value: int = 3
    """Of it."""


def some(value: int) -> str:
    """Text."""
    for _ in range(value):
        if value == 1:
            return "one"
        elif value == 2:
            return "two"
    try:
        return str(SMALLER(1) // value)
    except ZeroDivisionError:
        return "none"
'''
    root, tree = tmp_path / "source", tmp_path / "0"
    for folder in (root, tree):
        (folder / "vram_guard").mkdir(parents=True)
        (folder / "vram_guard" / "some.py").write_text(source)
    tool("recording").mark("vram_guard/some.py", root, tree)
    marked = (tree / "vram_guard" / "some.py").read_text()
    imported, begins = (
        "from vram_guard.reached_statements import REACHED as _reached_statements",
        "_reached_statements = {}",
    )
    assert imported in marked
    space = {"__name__": "some"}
    exec(compile(marked.replace(imported, begins), "some.py", "exec"), space)
    ran = space["_reached_statements"]
    mutants = tool("changes").mutants_of(root, "vram_guard/some.py")
    at = {mutant.line: mutant.statement for mutant in mutants}
    assert at[11] in ran  # imported
    assert at[5] not in ran  # only made by then: the lambda function has not run
    assert space["__doc__"] == space["some"].__doc__ == "Text."
    ran.clear()
    assert space["some"](1) == "one"
    assert at[19] in ran
    assert not {at[20], at[21], at[23], at[25]} & {*ran}
    assert space["some"](2) == "two"
    assert {at[20], at[21]} <= {*ran}
    assert at[5] not in ran
    assert space["some"](0) == "none"
    assert {at[5], at[23], at[25]} <= {*ran}


UNITS = """
def doubled(value):
    return value * 2

def in_a_copy(value):
    return value

def in_a_program(value):
    return value

def never(value):
    return value
"""
TESTS = '''
import os, subprocess, sys
from vram_guard.units import doubled, in_a_copy

def test_doubled():
    assert doubled(1) > 0

def test_in_a_copy():
    """It ends without handlers, and another one stays behind."""
    process = os.fork()
    if process == 0:
        os._exit(in_a_copy(1) - 1)
    assert os.waitpid(process, 0)[1] == 0
    behind = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open(os.environ["LEFT_BEHIND"], "a") as file:
        print(behind.pid, file=file)
    behind.returncode = 0  # no warning of it

def test_in_a_program():
    code = "from vram_guard.units import in_a_program; print(in_a_program(1))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\\n"
'''


@pytest.fixture
def small_tree(tmp_path):
    """A package with functions that tests call in their process, in a copy of it, in a program, or nowhere."""
    shutil.copytree(ROOT / "tools" / "mutants", tmp_path / "tools" / "mutants")
    (tmp_path / "vram_guard").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "vram_guard" / "__init__.py").write_text("")
    (tmp_path / "vram_guard" / "pytest_plugin.py").write_text("")  # pytest loads the installed one's name
    (tmp_path / "vram_guard" / "units.py").write_text(UNITS)
    (tmp_path / "tests" / "test_units.py").write_text(TESTS)
    for large in ("torch", "sympy"):
        (tmp_path / f"{large}.py").write_text("")  # nothing here waits for the real ones
    (tmp_path / ".gitignore").write_text("build/\n__pycache__/\nleft.txt\n")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def judged(tree, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tools.mutants", "units", "--workers", "1", *arguments],
        cwd=tree,
        env={**os.environ, "LEFT_BEHIND": str(tree / "left.txt"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells whose a process is")
def test_verdicts(small_tree):
    """A test that looks at the sign only, two that see the result of another process, and a function without one."""
    done = judged(small_tree)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "tests/test_units.py is recorded" in lines[0]
    assert sorted(line.strip() for line in lines[2:-1]) == sorted(
        [
            "survived  vram_guard/units.py:12: return value  ->  return None  (no test executes it)",
            "killed    vram_guard/units.py:3: return value * 2  ->  return None  by tests/test_units.py::test_doubled",
            "killed    vram_guard/units.py:3: value * 2  ->  (value // 2)  by tests/test_units.py::test_doubled",
            "survived  vram_guard/units.py:3: 2  ->  3",
            "survived  vram_guard/units.py:3: 2  ->  1",
            "killed    vram_guard/units.py:6: return value  ->  return None  by tests/test_units.py::test_in_a_copy",
            "killed    vram_guard/units.py:9: return value  ->  return None  by tests/test_units.py::test_in_a_program",
        ]
    )
    assert lines[-1] in (
        "vram_guard/units.py: {'killed': 4, 'survived': 3} of 7",
        "vram_guard/units.py: {'survived': 3, 'killed': 4} of 7",
    )
    left = (small_tree / "left.txt").read_text().split()
    assert left
    assert not [process for process in left if Path("/proc", process).exists()]

    for place, survived in (("units.py:3", True), ("units.py:1", False)):
        done = judged(small_tree, "--only", place)
        assert done.returncode == survived, done.stdout + done.stderr
        assert ("survived" in done.stdout) == survived
        assert "is recorded" not in done.stdout  # kept from the run before

    test = small_tree / "tests" / "test_units.py"
    test.write_text(test.read_text() + "\n\ndef test_wrong():\n    assert doubled(1) == 3\n")
    done = judged(small_tree, "--only", "units.py:3")
    assert "fail as they are: tests/test_units.py::test_wrong" in done.stdout
    assert "2  ->  3" in done.stdout  # judged by the others
    assert done.returncode == 1


def test_a_test_that_takes_too_long_is_ended(small_tree):
    (small_tree / "tests" / "test_slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(100)\n")
    code = (
        "import time; from pathlib import Path; from tools.mutants.runs import Job, run\n"
        "root = Path.cwd(); job = Job(['tests/test_slow.py'], {'tests/test_slow.py': 0.5})\n"
        "run(root, [job], [root], lambda *_: print(job.code, job.seconds < 60))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=small_tree, capture_output=True, text=True, check=False)
    assert done.stdout == "None True\n", done.stderr
