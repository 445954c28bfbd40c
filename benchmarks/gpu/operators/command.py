"""Measure the requests of single operators on the GPU of this machine, or predict those that were measured.

    python -m benchmarks gpu-operators [--jobs N] [--only WORD ...] [--out FILE]
    python -m benchmarks gpu-operators --against FILE [--only WORD ...]

Each operator is a training step of its own, of two updates. What is kept of it are its requests and frees in their
order, and its peaks. ``--against`` needs no GPU: it prints every operator whose requests are predicted otherwise, and
the exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.gpu.operators.measured import Requests, large, requests_of, until_the_end
from benchmarks.gpu.operators.table import OPERATORS, Operator
from benchmarks.gpu.replays import common_length
from benchmarks.gpu.worker import machine_of
from benchmarks.harness.checked import read, write_json
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.environment import Machine, device_used
from benchmarks.harness.workers import ask
from vram_guard import trace
from vram_guard.errors import InvalidInputError

FORMAT = "vram_guard operators on a GPU"
VERSION = 1
FOLDER = Path(__file__).parent

#: Bytes that cuDNN's states of dropout take on a GPU of 132 multiprocessors.
DROPOUT_STATES = 6_488_064
#: Operators that are measured in one process, and seconds after which it is given up.
IN_ONE_PROCESS = 24
LONGEST = 120.0


@dataclass(frozen=True)
class Found:
    """A whole run on one machine."""

    machine: Machine
    operators: list[Requests]


def main(arguments: list[str] | None = None) -> int:
    """Measure or compare."""
    options = _options(arguments)
    chosen = [one for one in OPERATORS if is_chosen(one.name, options.only)]
    if options.against is not None:
        try:
            return _compared(read(Found, options.against, VERSION, FORMAT), {one.name: one for one in chosen})
        except InvalidInputError as error:
            print(error, file=sys.stderr)
            return 2
    found = _measured(chosen, options.jobs)
    write_json(options.out, {"format": FORMAT, "version": VERSION, **asdict(found)})
    for failed in (one for one in found.operators if one.error):
        print(f"{failed.name}: {failed.error}")
    print(f"{len(found.operators)} operators, results in {options.out}")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = arguments_of("gpu-operators", __doc__, only="operators")
    parser.add_argument("--out", type=Path, default=FOLDER / "operators.json", metavar="FILE", help="what was measured")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predict what FILE holds, instead of measuring")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that measure at a time")
    return parser.parse_args(arguments)


def _measured(operators: list[Operator], jobs: int) -> Found:
    machine = ask(machine_of, "cuda", device_used(), limit=LONGEST, fresh=True).checked()
    families = [list(family) for _name, family in groupby(operators, lambda one: one.family)]
    groups = [
        [one.name for one in family[start : start + IN_ONE_PROCESS]]
        for family in families
        for start in range(0, len(family), IN_ONE_PROCESS)
    ]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        answers = list(pool.map(lambda names: ask(requests_of, names, limit=LONGEST, fresh=True), groups))
    found: list[Requests] = []
    for names, answer in zip(groups, answers, strict=True):
        parts = answer.result or [{"name": name, "error": answer.error.splitlines()[-1]} for name in names]
        found += [Requests(**part) for part in parts]
    return Found(Machine(**machine), found)


def _compared(found: Found, operators: dict[str, Operator]) -> int:
    """Print what differs; 1 where something does."""
    same: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for measured in found.operators:
        operator = operators.get(measured.name)
        if operator is None or measured.error:
            continue
        asked[operator.family] += 1
        try:
            difference = difference_of(measured, operator, found.machine)
        except Exception:  # noqa: BLE001 - one operator must not stop the others
            difference = f"NOT TRACED {traceback.format_exc().splitlines()[-1]}"
        same[operator.family] += not difference
        if difference:
            print(f"{measured.name}: {difference}", flush=True)
    for family, count in asked.items():
        print(f"{family:12} {same[family]:4} of {count:4} with the requests that were predicted")
    print(f"{'all':12} {same.total():4} of {asked.total():4}")
    return int(same != asked)


def difference_of(measured: Requests, operator: Operator, machine: Machine) -> str:
    """What was measured and what is predicted from the first request on that differs; "" where none does.

    The order of frees that follow each other is left open, and blocks that an operator before it left behind are left
    out: the states of cuDNN's dropout live as long as the process.
    """
    capability = machine.compute_capability[0], machine.compute_capability[1]
    traced = trace(operator.step(), compute_capability=capability, multiprocessors=machine.multiprocessors)
    timeline = traced.exact(1)
    predicted = until_the_end(large(timeline.events, timeline.sizes(1)))
    events = until_the_end([int(size) for size in measured.events.split()])
    if events[:1] == [DROPOUT_STATES] != predicted[:1]:
        events = events[1:]
    if predicted == events:
        return ""
    place = common_length(predicted, events)
    peak = timeline.at(1).peak_allocated
    told = [f"{each[place : place + 6]}" for each in (events, predicted)]
    return f"peak {measured.allocated:,} predicted {peak:,}; from {place} on measured {told[0]} predicted {told[1]}"
