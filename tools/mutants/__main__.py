"""``python -m tools.mutants``: judge samples of mutants."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.mutants.changes import Mutant, files_of, mutants_of
from tools.mutants.recording import ANSWER, MODULE, Kept, Record, mark, tests_for
from tools.mutants.rooms import ROOMS
from tools.mutants.runs import OUTPUT, Job, copied, run

LEAST_LIMIT, TIMES_USUAL = 30, 4  # seconds, and how often as long as without a change a test may take
WITHOUT_CHANGE = 600  # seconds that a test may take in the recording
IMPORTED_ONCE = ("numpy", "pytest", "sympy", "torch", "torch._dynamo")


def recorded(root: Path, room: str, tests: list[str], trees: list[Path], *, anew: bool) -> dict[str, Record]:
    """What each test file executes: as it was kept, or from a run of its own."""
    kept = Kept(root, room, Path("build", "mutants"))
    records = {test: None if anew else kept.read(test) for test in tests}
    missing = [Job([test], {test: WITHOUT_CHANGE}, records=True) for test, record in records.items() if not record]

    def ended(job: Job, tree: Path) -> None:
        (test,) = job.tests
        answer = tree / ANSWER
        if job.code not in (0, 1) or not answer.exists():
            print(f"{room}: {test} does not run\n{(tree / OUTPUT).read_text()[-2000:]}", flush=True)
            return
        records[test] = record = Record(**json.loads(answer.read_text()))
        answer.unlink()
        print(f"{room}: {test} is recorded, {job.seconds} s", flush=True)
        if record.failed:
            output = (tree / OUTPUT).read_text()[-2000:]
            print(f"{room}: fail as they are: {', '.join(record.failed)}\n{output}", flush=True)
        else:
            kept.write(test, record)

    if missing:
        for tree in trees:
            mark(room, root, tree)
        run(root, missing, trees, ended)
        for tree in trees:
            (tree / MODULE).unlink()
            for path in files_of(root, room):
                shutil.copy2(path, tree / path.relative_to(root))
    return {test: record for test, record in records.items() if record}


def judge(root: Path, chosen: list[Mutant], records: dict[str, Record], trees: list[Path]) -> None:
    """Run each mutant against its tests, and print the verdicts as they come."""
    limits = {test: max(LEAST_LIMIT, TIMES_USUAL * record.longest) for test, record in records.items()}
    jobs = [Job(tests_for(mutant, records), limits, mutant) for mutant in chosen]

    def ended(job: Job, tree: Path) -> None:
        assert job.mutant
        verdict = {0: "survived", 1: "killed", 2: "killed"}.get(-1 if job.code is None else job.code, "undecided")
        job.mutant.verdict, job.mutant.seconds = verdict, job.seconds
        if verdict == "killed":
            failed = [line for line in (tree / OUTPUT).read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
            job.mutant.killed_by = failed[0].split(" - ")[0].partition(" ")[2] if failed else ""
        print(f"  {job.mutant}", flush=True)

    for job in jobs:
        if not job.tests:
            assert job.mutant
            job.mutant.verdict = "survived"
            print(f"  {job.mutant}  (no test executes it)", flush=True)
    run(root, [job for job in jobs if job.tests], trees, ended)


def examine(root: Path, room: str, options: argparse.Namespace, trees: list[Path]) -> tuple[list[Mutant], bool]:
    """Judge a sample of a room's mutants, or those of the lines that are named; False if its tests fail as they are."""
    patterns: Sequence[str] = options.tests or ROOMS[room]
    found = [path for pattern in patterns for path in sorted((root / "tests").rglob(f"{pattern}.py"))]
    tests = list(dict.fromkeys(str(path.relative_to(root)) for path in found))
    every = mutants_of(root, room)
    chosen = random.Random(f"{options.seed} {room}").sample(every, min(options.sample, len(every)))  # noqa: S311 - no secret
    if options.only:
        chosen = [one for one in every if any(f"{one.file}:{one.line}".endswith(place) for place in options.only)]
        if not chosen:
            return [], True
    records = recorded(root, room, tests, trees, anew=options.anew)
    print(f"{room}: {len(chosen)} of {len(every)} mutants", flush=True)
    judge(root, chosen, records, trees)
    counts = Counter(mutant.verdict for mutant in chosen)
    print(f"{room}: {dict(counts)} of {len(every)}", flush=True)
    return chosen, len(records) == len(tests) and not any(record.failed for record in records.values())


def main() -> int:
    """Judge the rooms that are asked for; exit code 1 where a mutant survived, or a room's tests fail as they are."""
    parser = argparse.ArgumentParser(prog="mutants", description="Find small faults that no test would notice.")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"parts of room names, of {', '.join(ROOMS)}")
    parser.add_argument("--sample", type=int, default=10, metavar="N", help="mutants a room (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE:LINE", help="all mutants of these lines")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATTERN", help="of test files, not the room's own")
    parser.add_argument("--anew", action="store_true", help="record what tests execute again, whatever is kept")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="mutants at once (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every mutant with its verdict")
    options = parser.parse_args()
    rooms = [room for room in ROOMS if not options.rooms or any(part in room for part in options.rooms)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what runs is ended, the copies are removed
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    done: list[Mutant] = []
    right = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # Whoever edits the working tree meanwhile changes neither what is mutated nor what it is compared with.
        root, *trees = (copied(Path.cwd(), Path(folder) / str(number)) for number in range(options.workers + 1))
        for room in rooms:
            if (root / room).exists():
                found, passes = examine(root, room, options, trees)
                done, right = [*done, *found], right and passes
    if options.json:
        options.json.write_text(json.dumps([asdict(mutant) for mutant in done], indent=1) + "\n")
    return int(not right or any(mutant.verdict == "survived" for mutant in done))


if __name__ == "__main__":
    sys.exit(main())
