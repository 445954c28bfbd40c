"""Train under guards on the NVIDIA GPU of this machine: the predicted peaks beside those that were reached.

    python -m benchmarks gpu-guarded [--out FILE] [--jobs N] [--only WORD ...]

Run from the root of the repository, with the package installed (``vram-guard launch`` is one of the guards). Each
training is a process of its own. Its output lands beside FILE where it failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.checked import write_json
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.environment import environment

FOLDER = Path(__file__).parent / "results"
SCRIPT = str(Path(__file__).with_name("guarded_gpt2.py"))
ROOT = Path(__file__).parents[2]
#: Seconds after which a command is given up.
LONGEST = 240.0
VRAM_GUARD = ("-c", "from vram_guard.cli import main; raise SystemExit(main())")
Found = dict[str, Any]


class Guarded(NamedTuple):
    """One training under a budget."""

    name: str
    budget: str
    run: Callable[[str], Found]


def lightning(budget: str) -> Found:
    """The callback: it predicts and trains in one process."""
    printed = _output(SCRIPT, "lightning", budget)
    return {**_last(printed), "plan": _headline(printed)}


def launched(budget: str) -> Found:
    """``vram-guard launch``: planned by a dry run, then trained under that plan."""
    script = (SCRIPT, "trainer")
    planned = json.loads(_output(*VRAM_GUARD, "launch", "--dry-run", "--json", "--budget", budget, *script))
    printed = _output(*VRAM_GUARD, "launch", "--budget", budget, *script)
    found = planned["estimate"]
    predicted = [found["peak_allocated"], found["peak_reserved"]]
    return {**_last(printed), "predicted": predicted, "plan": _headline(printed)}


GUARDED = (
    *(Guarded("GPT-2 small, Lightning", budget, lightning) for budget in ("24GiB", "6GiB", "4GiB")),
    *(Guarded("GPT-2 small, Trainer", budget, launched) for budget in ("24GiB", "8GiB", "6GiB")),
)


def _output(*command: str) -> str:
    """What a process of Python prints on both streams.

    Raises:
        RuntimeError: it failed; the message is the end of what it printed.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": paths, "VRAM_GUARD_CACHE": scratch, "VRAM_GUARD_LANG": "en"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "--json" in command else subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    if done.returncode:
        raise RuntimeError((done.stdout + (done.stderr or ""))[-3000:])
    return done.stdout


def _last(printed: str) -> Found:
    """The JSON that a training prints as its last line."""
    line = next(line for line in reversed(printed.splitlines()) if line.startswith("{"))
    return json.loads(line)  # type: ignore[no-any-return]


def _headline(printed: str) -> str:
    """The changes of a plan in the guard's own words; "" where nothing changes."""
    words = " ".join(printed.split())
    _before, found, after = words.partition("fits with: ")
    return after.partition(" FITS ")[0] if found else ""


def _told(one: Guarded) -> Found:
    """One training's figures, or its error."""
    try:
        found = one.run(one.budget)
    except (RuntimeError, subprocess.TimeoutExpired, ValueError, StopIteration) as error:
        found = {"error": str(error)}
    row = {"name": one.name, "budget": one.budget, **found}
    print(json.dumps(row), flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Train and write; the exit status is 1 where a training failed."""
    parser = arguments_of("gpu-guarded", __doc__, only="trainings")
    parser.add_argument("--out", type=Path, default=FOLDER / "guarded.json", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings that run at a time")
    options = parser.parse_args(arguments)
    chosen = [one for one in GUARDED if is_chosen(f"{one.name} {one.budget}", options.only)]
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        rows = list(pool.map(_told, chosen))
    write_json(options.out, {"environment": environment(), "rows": rows})
    return int(any("error" in row for row in rows))
