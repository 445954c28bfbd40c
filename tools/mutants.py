"""Mutation testing, ``make mutants``: find small faults in the code that no test would notice.

For each room a seeded sample of changes is made, one node each: comparisons, signs, constants, ``and``/``or``, ``not``,
results replaced by None. Each is run against the tests nearest to the room, in a copy of the working tree. A mutant is
killed when a test fails, survives when all pass, and is undecided when the tests take too long or do not run at all.
The run without a change tells which tests execute which lines; a mutant is run against those that execute its own.

Importing torch takes longer than many a room's tests: every run is forked from one process that has imported torch,
what it would import late, and pytest, and nothing of this project.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Room (a folder or a file) -> patterns of the tests nearest to it, under tests/, run in this order: quick ones first.
ROOMS = {
    "vram_guard/allocator": ["test_allocator*", "test_host_memory"],
    "vram_guard/apply": [
        "test_microbatch*",
        "test_loss_terms*",
        "test_plan_learning_rate*",
        "test_outputs*",
        "test_sliced_forward*",
    ],
    "vram_guard/budget": ["test_budget*", "test_catalogue*", "test_monitor*"],
    "vram_guard/capture": ["test_object_reference*", "test_hugging_face*", "test_gpus_model*", "test_variants*"],
    "vram_guard/cli": ["test_cli*", "test_compare*", "test_estimate*", "test_monitor*", "test_optimize*"],
    "vram_guard/closed_form": [
        "test_calculator*",
        "test_closed_form*",
        "test_recommend*",
        "test_gpus_model*",
        "test_estimate_folder*",
    ],
    "vram_guard/compose": ["test_compose*"],
    "vram_guard/forks": ["test_forks"],
    "vram_guard/guard": [
        "test_guard*",
        "test_lightning_settings*",
        "test_mmengine_settings*",
        "test_lightning_growth*",
        "test_lightning_guard*",
    ],
    "vram_guard/longest": ["test_longest_sources", "test_longest", "test_longest_trainings"],
    "vram_guard/optimize": ["test_optimize*"],
    "vram_guard/parallel": ["test_parallel*", "test_plan_communication", "test_plan_gpus*"],
    "vram_guard/plan": ["test_codec*", "test_plan_*", "test_variants*", "test_cost*", "test_plan"],
    "vram_guard/proof": ["test_proof*"],
    "vram_guard/releases": ["test_releases*"],
    "vram_guard/report": ["test_report*", "test_compare*"],
    "vram_guard/simulate": [
        "test_shape_rules*",
        "test_op_cost*",
        "test_norms*",
        "test_external_loop*",
        "test_simulate*",
        "test_cudnn*",
        "test_cuda_rules*",
        "test_left_behind*",
        "test_hard*",
    ],
    "vram_guard/scratch": ["test_scratch*"],
    "vram_guard/state": ["test_state*", "test_sliced_forward*", "test_left_behind*", "test_watch_recovery*"],
    "vram_guard/techniques": ["test_techniques*"],
    "vram_guard/watch": ["test_watch_[!r]*", "test_monitor*", "test_watch_r*", "test_optimize*"],
    "vram_guard/check.py": ["test_check*"],
    "vram_guard/checks.py": ["test_settings*", "test_units*"],
    "vram_guard/codec.py": ["test_codec*"],
    "vram_guard/config_file.py": ["test_config_file*"],
    "vram_guard/interpolation.py": ["test_config_file*"],
    "vram_guard/job.py": ["test_job"],
    "vram_guard/language.py": ["test_language*"],
    "vram_guard/module_names.py": ["test_report*"],
    "vram_guard/notebooks.py": ["test_notebooks"],
    "vram_guard/patching.py": ["test_patching*"],
    "vram_guard/plain_model.py": ["test_plain_model"],
    "vram_guard/printable.py": ["test_printable"],
    "vram_guard/private_names.py": ["test_private_api"],
    "vram_guard/pytest_plugin.py": ["test_check"],
    "vram_guard/step.py": ["test_plan", "test_simulate*"],
    "vram_guard/timeline": ["test_timeline*", "test_simulate*", "test_streams*", "test_plan"],
    "vram_guard/units.py": ["test_units*"],
    "vram_guard/settings.py": ["test_settings*"],
    "vram_guard/tensors.py": ["test_outputs", "test_microbatch", "test_state"],
    # Without the tests that launch several processes.
    "integrations/vram_guard_lightning": [
        "test_lightning_[!dr]*",
        "test_lightning_recovery",
    ],
    "integrations/vram_guard_mmengine": ["test_mmengine_[!d]*"],
    "integrations/vram_guard_accelerate": [
        "test_accelerate_[mpr]*",
        "test_accelerate_loaders",
        "test_accelerate_dry_run",
        "test_accelerate_habits",
    ],
}
#: Arguments that refuse what correct code never does (zip's and dataclass's), or say which line a warning names.
CHECKS_OF_OUR_OWN = ("strict", "frozen", "slots", "stacklevel")
LEAST_LIMIT, TIMES_USUAL = 30, 4  # seconds, and how often as long as without a change the tests may take
IMPORTED_ONCE = ("numpy", "pytest", "sympy", "torch", "torch._dynamo")
REACHED = "reached.json"
EVERY_TEST = ""  # executed when modules are imported
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
    verdict: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict:9} {self.file}:{self.line}: {self.before}  ->  {self.after}"


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


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, nothing for type checkers, nothing inside f-strings (they have no own place)."""
    if isinstance(tree, ast.keyword) and tree.arg in CHECKS_OF_OUR_OWN:
        return
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or (
            isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from nodes(child)


def mutants_of(room: str) -> list[Mutant]:
    """Every change of a room, in the order of its files."""
    found = []
    for path in [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py")):
        source = path.read_bytes()
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        for node in nodes(ast.parse(source)):
            for after in changes(node):
                span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
                before = source[slice(*span)].decode()
                found.append(Mutant(room, str(path.relative_to(ROOT)), node.lineno, *span, before, after))
    return found


class Reached:
    """A plugin of pytest that writes down which lines of a room's files each test executes, in this process.

    Args:
        folder: of the tree.
        room: in it.
    """

    def __init__(self, folder: Path, room: str) -> None:
        self._folder, self._room = folder, str(folder / room)
        self._test = EVERY_TEST
        self._lines: dict[str, set[str]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Fixtures of wide scope are made in one test's setup: what they execute counts for all tests of the file."""
        self._test = nodeid.partition("::")[0]

    def pytest_runtest_call(self, item: Any) -> None:
        """Parameters are left out: a mutant is run against all of a test's."""
        self._test = item.nodeid.partition("[")[0]
        self.follow()  # where a test has taken the trace function away

    def pytest_runtest_teardown(self) -> None:
        """As for the setup."""
        self._test = self._test.partition("::")[0]

    def pytest_unconfigure(self) -> None:
        """Where the other process looks for it."""
        sys.settrace(None)
        found = {place: sorted(tests) for place, tests in self._lines.items()}
        (self._folder / REACHED).write_text(json.dumps(found))

    def follow(self) -> None:
        """From now on."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: Any, _event: str, _argument: Any) -> Any:
        return self._executed if frame.f_code.co_filename.startswith(self._room) else None

    def _executed(self, frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            place = f"{frame.f_code.co_filename[len(str(self._folder)) + 1 :]}:{frame.f_lineno}"
            self._lines.setdefault(place, set()).add(self._test)
        return self._executed


def tests_for(mutant: Mutant, reached: dict[str, list[str]], tests: list[str]) -> list[str]:
    """The tests that execute a mutant's lines; all, where none does so in the process that was followed."""
    lines = range(mutant.line, mutant.line + mutant.before.count("\n") + 1)
    found = {test for line in lines for test in reached.get(f"{mutant.file}:{line}", [])}
    if not found or EVERY_TEST in found:
        return tests
    files = {test for test in found if "::" not in test}
    chosen = [test for test in found if test in files or test.partition("::")[0] not in files]
    return sorted(chosen, key=lambda test: (tests.index(test.partition("::")[0]), test))


def start(tree: Path, tests: list[str], room: str = "") -> int:
    """Fork a process that runs tests in a tree; it ends with pytest's exit code.

    Args:
        tree: a copy of the working tree.
        tests: files, or names of tests.
        room: what is followed with :class:`Reached`; "" for nothing.
    """
    process = os.fork()
    if process:
        return process
    os.setsid()
    os.chdir(tree)
    paths = [str(tree), str(tree / "integrations"), str(tree / "tests")]
    sys.path[:0], os.environ["PYTHONPATH"] = paths, os.pathsep.join(paths)
    silent = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import pytest

    plugins = [Reached(tree, room)] if room else []
    for plugin in plugins:
        plugin.follow()
    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins))
    except BaseException:  # noqa: BLE001 - this process is a copy, and must not go on as the original
        traceback.print_exc()
    os._exit(code)


def copied(folder: Path) -> Path:
    """The working tree without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)  # noqa: S603
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(
    jobs: list[tuple[Mutant | None, list[str]]], trees: list[Path], limit: float, room: str = ""
) -> list[tuple[int | None, float]]:
    """Exit code (None: too slow) and seconds of each job, as many at once as there are trees.

    Args:
        jobs: what is changed (None: nothing), and the tests that are run.
        trees: copies of the working tree.
        limit: seconds for a job.
        room: see :func:`start`.
    """
    results: list[tuple[int | None, float]] = [(None, 0.0)] * len(jobs)
    free, waiting, running = [*trees], [*enumerate(jobs)], {}
    while waiting or running:
        while free and waiting:
            (index, (mutant, tests)), tree = waiting.pop(0), free.pop()
            if mutant:
                source = (ROOT / mutant.file).read_bytes()
                mutated = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
                (tree / mutant.file).write_bytes(mutated)
            running[start(tree, tests, room)] = index, tree, time.monotonic()
        time.sleep(0.02)
        for process, (index, tree, began) in [*running.items()]:
            ended, status = os.waitpid(process, os.WNOHANG)
            seconds = time.monotonic() - began
            if not ended and seconds < limit:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # what a test left behind too
            if not ended:
                os.waitpid(process, 0)
            results[index] = (os.waitstatus_to_exitcode(status) if ended else None), round(seconds, 1)
            del running[process]
            free.append(tree)
            if mutant := jobs[index][0]:
                shutil.copy2(ROOT / mutant.file, tree / mutant.file)
    return results


def examine(room: str, sample: int, seed: int, only: list[str], trees: list[Path]) -> list[Mutant]:
    """Judge a sample of a room's mutants; or those of the lines that are named, all of them."""
    found = [path for pattern in ROOMS[room] for path in sorted(Path("tests").glob(f"{pattern}.py"))]
    tests = [*map(str, dict.fromkeys(found))]
    every = mutants_of(room)
    chosen = random.Random(f"{seed} {room}").sample(every, min(sample, len(every)))  # noqa: S311 - no secret
    if only:
        chosen = [one for one in every if any(f"{one.file}:{one.line}".endswith(place) for place in only)]
        if not chosen:
            return []
    tree = trees[-1]
    ((code, usual),) = run([(None, tests)], [tree], limit=1e9, room=room)
    if code != 0:
        print(f"{room}: its tests fail as they are\n{(tree / 'output.txt').read_text()[-2000:]}")
        return []
    reached = json.loads((tree / REACHED).read_text())
    jobs = [(mutant, tests_for(mutant, reached, tests)) for mutant in chosen]
    results = run(jobs, trees, max(LEAST_LIMIT, TIMES_USUAL * usual))
    for mutant, (code, mutant.seconds) in zip(chosen, results, strict=True):
        mutant.verdict = {0: "survived", 1: "killed", 2: "killed"}.get(code, "undecided")
    counts = Counter(mutant.verdict for mutant in chosen)
    print(f"{room}: {dict(counts)} of {len(every)}; its tests take {usual} s", flush=True)
    for mutant in sorted(chosen, key=lambda one: (one.file, one.line)):
        if mutant.verdict != "killed":
            print(f"  {mutant}", flush=True)
    return chosen


def main() -> int:
    """Judge the rooms that are asked for; exit code 1 where a mutant survived, or a room's tests fail as they are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"parts of room names, of {', '.join(ROOMS)}")
    parser.add_argument("--sample", type=int, default=10, metavar="N", help="mutants a room (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE:LINE", help="all mutants of these lines")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="mutants at once (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every mutant with its verdict")
    options = parser.parse_args()
    os.chdir(ROOT)
    rooms = [room for room in ROOMS if not options.rooms or any(part in room for part in options.rooms)]
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    done: list[Mutant] = []
    broken = False
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copied(Path(folder) / str(number)) for number in range(options.workers)]
        for room in rooms:
            if (ROOT / room).exists():
                found = examine(room, options.sample, options.seed, options.only, trees)
                done, broken = [*done, *found], broken or not (found or options.only)
    if options.json:
        options.json.write_text(json.dumps([asdict(mutant) for mutant in done], indent=1) + "\n")
    return int(broken or any(mutant.verdict == "survived" for mutant in done))


if __name__ == "__main__":
    sys.exit(main())
