"""Predict what single operators ask CUDA's allocator for, beside what was measured on an H100.

    python -m benchmarks gpu-operators [--only WORD ...]

Each operator is a training step of its own, of two updates. ``operators.json`` has its requests and frees in their
order, and its peaks. Every operator whose requests are predicted otherwise is printed, and the exit status is 1 where
there is one.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.operators.table import OPERATORS, Operator
from benchmarks.gpu.replays import LEAST_REQUEST, common_length
from benchmarks.harness.checked import read
from benchmarks.harness.command import arguments_of, is_chosen
from benchmarks.harness.environment import Machine
from vram_guard import trace

FORMAT = "vram_guard operators on a GPU"
VERSION = 1
MEASURED = Path(__file__).parent / "operators.json"

#: Bytes that cuDNN's states of dropout take on a GPU of 132 multiprocessors.
DROPOUT_STATES = 6_488_064


@dataclass(frozen=True)
class Requests:
    """What one operator's step asked the allocator for. Sizes in bytes."""

    name: str
    events: str = ""
    """Requests (positive) and frees (negative), in order; frees that follow each other are sorted by their sizes."""
    allocated: int = 0
    reserved: int = 0
    error: str = ""
    """The last line of the traceback, where the operator failed."""


@dataclass(frozen=True)
class Found:
    """A whole run on one machine."""

    machine: Machine
    operators: list[Requests]


def measured_operators() -> Found:
    """What was measured."""
    return read(Found, MEASURED, VERSION, FORMAT)


def main(arguments: list[str] | None = None) -> int:
    """Compare; 1 where something differs."""
    options = arguments_of("gpu-operators", __doc__, only="operators").parse_args(arguments)
    operators = {one.name: one for one in OPERATORS if is_chosen(one.name, options.only)}
    found = measured_operators()
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


def large(events: Iterable[int], sizes: Any) -> list[int]:
    """Requests (positive) and frees (negative) of at least LEAST_REQUEST bytes, in order.

    Of frees that follow each other the order is left open: autocast's cache frees its copies by their addresses.

    Args:
        events: block for a request, ~block for a free.
        sizes: of the blocks, in bytes.
    """
    told = [sizes[event] if event >= 0 else -sizes[~event] for event in events]
    runs = groupby((size for size in told if abs(size) >= LEAST_REQUEST), lambda size: size < 0)
    return [int(size) for freed, run in runs for size in (sorted(run) if freed else run)]


def until_the_end(events: list[int]) -> list[int]:
    """The events without the last frees, with which model and optimizer die."""
    return events[: 1 + max((at for at, size in enumerate(events) if size > 0), default=-1)]
