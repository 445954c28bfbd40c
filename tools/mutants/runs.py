"""Runs of tests in copies of the working tree, in processes that leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutants.changes import Mutant
from tools.mutants.recording import Recorder

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Written before each test: when it has taken too long (seconds of the monotonic clock).
_DEADLINE = "deadline.txt"
OUTPUT = "output.txt"
_COLLECTING = 120  # seconds


@dataclass
class Job:
    """Tests that are to be run.

    Args:
        tests: files, or names of tests.
        limits: test file -> seconds that each of its tests may take.
        mutant: what is changed; None for nothing.
        records: the run is to be recorded, and the tree is marked for it.
    """

    tests: list[str]
    limits: dict[str, float]
    mutant: Mutant | None = None
    records: bool = False
    code: int | None = None
    """Of pytest; None where a test took too long."""
    seconds: float = 0.0


@dataclass(eq=False)
class _Deadlines:
    """A plugin of pytest that says when the test that begins has taken too long."""

    tree: Path
    limits: dict[str, float]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        set_deadline(self.tree, self.limits[nodeid.partition("::")[0]])


def set_deadline(tree: Path, seconds: float) -> None:
    """So long from now."""
    new = tree / f"{_DEADLINE}.new"
    new.write_text(str(time.monotonic() + seconds))
    new.replace(tree / _DEADLINE)  # never read half


def copied(root: Path, folder: Path) -> Path:
    """The working tree without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)  # noqa: S603
    for name in listed.stdout.decode().splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def run(root: Path, jobs: Sequence[Job], trees: list[Path], ended: Callable[[Job, Path], None]) -> None:
    """Do jobs, as many at once as there are trees.

    Args:
        root: of the working tree.
        jobs: they are given their code and their seconds.
        trees: copies of the working tree.
        ended: called after each job, with the tree where it ran.
    """
    free, waiting = [*trees], [*jobs]
    running: dict[int, tuple[Job, Path, float]] = {}
    try:
        while waiting or running:
            while free and waiting:
                job, tree = waiting.pop(0), free.pop()
                running[_start(root, tree, job)] = job, tree, time.monotonic()
            time.sleep(0.05)
            for process, (job, tree, began) in [*running.items()]:
                over, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() > float((tree / _DEADLINE).read_text())
                if not over and not late:
                    continue
                if not over:
                    _end(process)
                job.code = os.waitstatus_to_exitcode(status) if over else None
                job.seconds = round(time.monotonic() - began, 1)
                del running[process]
                free.append(tree)
                if job.mutant:
                    shutil.copy2(root / job.mutant.file, tree / job.mutant.file)
                ended(job, tree)
    finally:
        for process in running:
            _end(process)


def _end(process: int) -> None:
    """End a run, and wait until nothing is left of it."""
    os.kill(process, signal.SIGTERM)
    os.waitpid(process, 0)


def _start(root: Path, tree: Path, job: Job) -> int:
    """Fork a process that does a job in a tree; it ends with pytest's exit code."""
    if job.mutant:
        source = (root / job.mutant.file).read_bytes()
        mutated = source[: job.mutant.start] + job.mutant.after.encode() + source[job.mutant.end :]
        (tree / job.mutant.file).write_bytes(mutated)
    set_deadline(tree, _COLLECTING + max(job.limits.values(), default=0.0))
    keeper = os.fork()
    if keeper:
        return keeper
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _adopt_all()
    tests = os.fork()
    if tests == 0:
        _run_tests(tree, job)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(tests, signal.SIGKILL))
    _, status = os.waitpid(tests, 0)
    for child in iter(_children_left, None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    os._exit(max(os.waitstatus_to_exitcode(status), -1) % 256)


def _adopt_all() -> None:
    """What the tests start, in sessions of its own too, becomes this process's when its parent ends."""
    os.setsid()
    if sys.platform == "linux":
        control = ctypes.CDLL(None).prctl
        control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        control(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children_left() -> int | None:
    """A process whose parent is this one."""
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(place.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                return int(place.parent.name)
    return None


def _run_tests(tree: Path, job: Job) -> None:
    """Never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(tree)
    paths = [str(tree / name) for name in (".", "integrations", "tests", "tests/cases")]
    sys.path[:0], os.environ["PYTHONPATH"] = paths, os.pathsep.join(paths)
    # Tests that are killed leave their temporary files, and this process has no exit handlers.
    temporary = tree.with_name(f"{tree.name}-tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    silent = os.open(tree / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import pytest

    plugins: list[Any] = [_Deadlines(tree, job.limits)]
    if job.records:
        plugins.append(Recorder(tree, *job.tests))
    code = 3
    try:
        # A test's own time limit would be a failure, and count as a mutant that was noticed.
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
        options += [] if job.records else ["-x"]
        code = int(pytest.main([*options, *job.tests], plugins))
    except BaseException:  # noqa: BLE001 - this process is a copy, and must not go on as the original
        traceback.print_exc()
    os._exit(code)
