"""Which tests execute which statements of a room, in the tests' process and in all that it starts.

For the recording, each statement of the room's files is preceded by one that sets a byte in a file which every process
maps into its memory. So a dry run that is forked, ends by ``os._exit``, traces lines itself or may no longer open files
is seen as any other.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import mmap
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.mutants.changes import Mutant, files_of, statements

#: A copy that a guard makes keeps what it writes into shared memory for itself, but where the name has brackets.
BYTES = "[reached]"
ANSWER = "recording.json"
#: The module of the copied tree that maps the bytes.
MODULE = "vram_guard/reached_statements.py"
_SOURCE = '''\
"""One byte for each statement: 1 once it was executed."""
import mmap

try:
    with open({path!r}, "r+b") as file:
        REACHED = mmap.mmap(file.fileno(), 0)
except OSError:  # a process that may not write
    REACHED = bytearray({size})
'''
_NAME = "_reached_statements"


def mark(room: str, root: Path, tree: Path) -> None:
    """Write the room's files into a copy of the working tree such that they tell what they execute."""
    first = 0
    for path in files_of(root, room):
        parsed = ast.parse(path.read_bytes())
        first = _marked(parsed, first)
        (tree / path.relative_to(root)).write_text(ast.unparse(ast.fix_missing_locations(parsed)), encoding="utf-8")
    # Beside the tree: what a test lists of it is as ever.
    where = tree.with_name(f"{tree.name}{BYTES}")
    where.write_bytes(bytes(first + 1))
    (tree / MODULE).write_text(_SOURCE.format(path=str(where), size=first + 1))


def _marked(tree: ast.Module, first: int) -> int:
    """Mark statements and lambda functions from this number on; returns the number after the last."""
    numbers = {node: first + number for number, node in enumerate(statements(tree))}
    for node in [tree, *ast.walk(tree)][1:]:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, [new for one in value for new in _after_its_mark(one, numbers[one])])
        if isinstance(node, ast.Lambda):
            said = ast.parse(f"{_NAME}.__setitem__({numbers[node]}, 1)", mode="eval").body  # None
            node.body = ast.BoolOp(ast.Or(), [said, node.body])
    after = len([*itertools.takewhile(_stands_first, tree.body)])
    tree.body[after:after] = ast.parse(f"from vram_guard.reached_statements import REACHED as {_NAME}").body
    return first + len(numbers)


def _stands_first(one: ast.stmt) -> bool:
    """A docstring, or what Python wants before all other statements."""
    text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
    return text or (isinstance(one, ast.ImportFrom) and one.module == "__future__")


def _after_its_mark(one: ast.stmt, number: int) -> list[ast.stmt]:
    return [one] if _stands_first(one) else [*ast.parse(f"{_NAME}[{number}] = 1").body, one]


@dataclass
class Record:
    """What the tests of one file execute."""

    reached: dict[str, list[int]] = field(default_factory=dict)
    """Name of a test -> the statements it executes; under the file's name those of imports and of fixtures."""
    seconds: dict[str, float] = field(default_factory=dict)
    longest: float = 0.0
    """Seconds of the slowest test, with its fixtures."""
    failed: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    """Tests that use fixtures which several tests share: any of them may have to wait until one is made."""


class Recorder:
    """A plugin of pytest that writes a :class:`Record` of one test file.

    Args:
        tree: the copy of the working tree.
        test: the file.
    """

    def __init__(self, tree: Path, test: str) -> None:
        self._tree, self._test = tree, test
        with tree.with_name(f"{tree.name}{BYTES}").open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._record = Record()
        self._reached: dict[str, set[int]] = {}
        self._spent: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        """What importing the file has executed counts for all of its tests."""
        self._take(self._test)

    def pytest_runtest_setup(self, item: Any) -> None:
        """Fixtures of pytest itself and of its plugins cost nothing."""
        found = [one for every in item._fixtureinfo.name2fixturedefs.values() for one in every if one.baseid]  # noqa: SLF001
        name = item.nodeid.partition("[")[0]
        if any(one.scope != "function" for one in found) and name not in self._record.sharing:
            self._record.sharing.append(name)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """After setup, call and teardown of each test.

        Fixtures of wide scope are made in one test's setup: what they execute counts for all tests of the file.
        Parameters are left out: a mutant is run against all of a test's.
        """
        name = report.nodeid.partition("[")[0]
        self._take(name if report.when == "call" else self._test)
        if report.failed and name not in self._record.failed:
            self._record.failed.append(name)
        seconds = self._record.seconds
        seconds[name] = seconds.get(name, 0.0) + report.duration
        self._spent[report.nodeid] = self._spent.get(report.nodeid, 0.0) + report.duration

    def pytest_unconfigure(self) -> None:
        """Where the tool looks for it."""
        self._record.reached = {name: sorted(numbers) for name, numbers in self._reached.items()}
        self._record.longest = max(self._spent.values(), default=0.0)
        (self._tree / ANSWER).write_text(json.dumps(asdict(self._record)))

    def _take(self, name: str) -> None:
        found = bytes(self._bytes)
        self._bytes[:] = bytes(len(found))
        self._reached.setdefault(name, set()).update(number for number, byte in enumerate(found) if byte)


class Kept:
    """Records on disk, each valid as long as the room, its test file, helpers of the tests and this module stay.

    Args:
        root: of the tree that is recorded.
        room: in it.
        folder: where the records of all rooms are.
    """

    def __init__(self, root: Path, room: str, folder: Path) -> None:
        self._root = root
        self._folder = folder / room.replace("/", ".")
        helpers = [path for path in sorted((root / "tests").rglob("*.py")) if not path.name.startswith("test_")]
        how = [path.read_text() for path in (Path(__file__), Path(__file__).with_name("changes.py"))]
        self._common = self._digest([*files_of(root, room), *helpers], "".join([sys.version, *how]))

    def read(self, test: str) -> Record | None:
        """The record of a test file, if it is still valid."""
        try:
            kept = json.loads(self._of(test).read_text())
        except (OSError, ValueError):
            return None
        return Record(**kept["record"]) if kept["digest"] == self._key(test) else None

    def write(self, test: str, record: Record) -> None:
        """Keep one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._of(test).write_text(json.dumps({"digest": self._key(test), "record": asdict(record)}))

    def _of(self, test: str) -> Path:
        return self._folder / f"{Path(test).stem}.json"

    def _key(self, test: str) -> str:
        return self._digest([self._root / test], self._common)

    def _digest(self, files: Iterable[Path], also: str) -> str:
        found = hashlib.sha256(also.encode())
        for path in files:
            found.update(f"{path.relative_to(self._root)}\n".encode())
            found.update(path.read_bytes())
        return found.hexdigest()


def tests_for(mutant: Mutant, records: dict[str, Record]) -> list[str]:
    """The tests that execute a mutant's statement, the quick ones first; none where none does.

    Those of a file that share fixtures stay together, and come after all others.
    """
    chosen: list[tuple[bool, float, list[str]]] = []
    for test, record in records.items():
        names = [name for name, numbers in record.reached.items() if mutant.statement in numbers]
        own = [name for name in record.seconds if name not in record.failed and (test in names or name in names)]
        together = [name for name in own if name in record.sharing]
        if together:
            chosen.append((True, record.longest + sum(record.seconds[name] for name in together), together))
        chosen += [(False, record.seconds[name], [name]) for name in own if name not in together]
    return [name for _sharing, _seconds, names in sorted(chosen) for name in names]
