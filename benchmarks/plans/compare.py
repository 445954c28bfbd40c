"""One training on one budget: what is planned, and what halving the batch until it fits would have done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vram_guard import plan
from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.plan.step_time import step_seconds
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.plans.workloads import Workload
    from vram_guard import Plan, Timeline

#: Host memory that plans may use, whatever this machine has: a workstation's.
HOST_BUDGET = "128GiB"


def rows(name: str, workload: Workload, budgets: list[str], gpu: str, say: Callable[[str], None]) -> Iterator[Any]:
    """A row of the report for each budget."""
    for budget in budgets:
        try:
            amount = Budget.resolve(budget=budget, gpu=gpu)
        except InvalidInputError as error:  # more than the card has
            say(f"{budget}: {error}")
            continue
        yield {"workload": name, "title": workload.title, "budget": budget, **row(workload, amount, say)}


def row(workload: Workload, budget: Budget, say: Callable[[str], None]) -> dict[str, Any]:
    """What is planned and what halving does, with bytes as ints and times as multiples of the step as written."""
    size, traces = workload.batch_size, list[str]()

    def heard(line: str) -> None:
        traces.append(line)
        say(f"{format_bytes(budget.total)}: {line}")

    start = time.perf_counter()
    made = plan(workload.step, size, budget, host_budget=HOST_BUDGET, progress=heard)
    seconds = time.perf_counter() - start
    assert made.timeline_before is not None
    return {
        "usable": budget.usable,
        "as_written": made.before.peak_reserved,
        "batch_size": size,
        "fits": made.fits,
        "changed": made.changed,
        "plan": in_words(made),
        "peak": made.peak,
        "slowdown": made.slowdown,
        "host_peak": made.estimate.host_peak,
        "halving": halving(made.timeline_before, size, budget),
        "seconds": seconds,
        "traces": sum(line.startswith("tracing") for line in traces),
        "explanation": made.explain(),
    }


def in_words(made: Plan) -> str:
    """The plan in one line."""
    if not made.changed:
        return "as written" if made.fits else "nothing fits"
    from vram_guard.plan.search_space import Option

    words = Option(made.precision, made.splits, made.recipe).words(made.batch_size)
    return words.removeprefix(f"{made.precision_before}, ")


def halving(timeline: Timeline, batch_size: int, budget: Budget) -> dict[str, Any] | None:
    """Lightning's ``BatchSizeFinder`` and Accelerate's ``find_executable_batch_size``: half the batch until it fits.

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
