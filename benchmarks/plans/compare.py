"""One training on one budget: what is planned, and what halving the batch until it fits would have done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.harness.records import Row
from benchmarks.harness.workloads import WORKLOADS, Workload
from vram_guard import Budget, Plan, Timeline, plan
from vram_guard.errors import InvalidInputError
from vram_guard.plan.search_space import Option
from vram_guard.plan.step_time import step_seconds
from vram_guard.units import format_bytes

#: Host memory that plans may use, whatever this machine has: a workstation's.
HOST_BUDGET = "128GiB"


def planned(name: str, budgets: list[str], gpu: str) -> list[dict[str, Any]]:
    """In a worker: the rows of one training; progress on standard error."""
    workload = WORKLOADS[name]
    workload.prepare()
    found = rows(workload, budgets, gpu, lambda line: print(f"{name}, {line}", file=sys.stderr, flush=True))
    return [asdict(row) for row in found]


def rows(workload: Workload, budgets: list[str], gpu: str, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each budget that the card has."""
    for budget in budgets:
        try:
            amount = Budget.resolve(budget=budget, gpu=gpu)
        except InvalidInputError as error:
            say(f"{budget}: {error}")
            continue
        yield row(workload, amount, say, name=budget)


def row(workload: Workload, budget: Budget, say: Callable[[str], None], name: str = "") -> Row:
    """The plan (the row's prediction is its peak) and the result of halving; times relative to the step as written.

    Args:
        workload: what is trained.
        budget: what it may take.
        say: is given a line about each trace.
        name: the budget as it was asked for.
    """
    size, traces = workload.batch_size, list[str]()

    def heard(line: str) -> None:
        traces.append(line)
        say(f"{format_bytes(budget.total)}: {line}")

    start, used = time.perf_counter(), processor_seconds()
    made = plan(workload.step, size, budget, host_budget=HOST_BUDGET, progress=heard)
    seconds, used = time.perf_counter() - start, processor_seconds() - used
    assert made.timeline_before is not None
    return Row(
        source=workload.title,
        name=name,
        measured=None,
        predicted=made.peak,
        tier=made.estimate.tier,
        seconds=seconds,
        fits=made.fits,
        details={
            "usable": budget.usable,
            "as_written": made.before.peak_reserved,
            "batch_size": size,
            "changed": made.changed,
            "plan": in_words(made),
            "slowdown": made.slowdown,
            "host_peak": made.estimate.host_peak,
            "halving": halving(made.timeline_before, size, budget),
            "processor": used,
            "traces": sum(line.startswith("tracing") for line in traces),
            "explanation": made.explain(),
        },
    )


def processor_seconds() -> float:
    """Processor time of this process and of the copies of it that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def in_words(made: Plan) -> str:
    """The plan in one line."""
    if not made.changed:
        return "as written" if made.fits else "nothing fits"
    words = Option(made.precision, made.splits, made.recipe).words(made.batch_size)
    return words.removeprefix(f"{made.precision_before}, ")


def halving(timeline: Timeline, batch_size: int, budget: Budget) -> dict[str, Any] | None:
    """Half the batch until it fits, as people do by hand.

    Nothing else changes: the effective batch shrinks with it, and an epoch has as many more optimizer steps. The time
    is that of as many samples as the batch as written has, over the step as written, by the same cost model.

    Returns:
        None where not even one sample fits.
    """
    size = batch_size
    while size and timeline.at(size).peak_reserved > budget.usable:
        size //= 2
    if not size:
        return None
    written = step_seconds(timeline, batch_size, budget.gpu).seconds
    slowdown = step_seconds(timeline, size, budget.gpu).seconds * batch_size / size / written
    return {"batch_size": size, "peak": timeline.at(size).peak_reserved, "slowdown": slowdown}
