"""Statistics of predictions: errors, wrong verdicts, and how far predictions fall short."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness.records import Row
from vram_guard.errors import InvalidInputError

OURS = "vram_guard"

#: Seconds for one estimate that the tools' authors state themselves (xMem's paper, its runtime table).
PUBLISHED_SECONDS = {"xmem": 24.0, "dnnmem": 36.0}


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest-rank quantile: the least value that at least ``share`` of them do not exceed.

    Raises:
        InvalidInputError: where there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise InvalidInputError("no rows to take a quantile of: measure first")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Errors(NamedTuple):
    """Absolute errors' median and 90th percentile, and the signed ones' median."""

    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors | None:
        """None for no errors."""
        if not errors:
            return None
        absolute = [abs(error) for error in errors]
        return cls(statistics.median(absolute), quantile(absolute, 0.9), statistics.median(errors))


class Line(NamedTuple):
    """One tool on one group of rows; None: not shown."""

    tool: str
    rows: int
    errors: Errors | None
    wrong: int
    verdicts: int
    seconds: float | None
    ours_there: Errors | None = None
    """Ours on the rows that this tool has an answer for."""


def lines(rows: Sequence[Row]) -> Iterator[Line]:
    """One line for us and one for each other tool."""
    errors = [row.error for row in rows if row.has_peak]
    verdicts = [row.right_verdict for row in rows if row.right_verdict is not None]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    yield _line(OURS, errors, verdicts, statistics.mean(seconds) if seconds else None)
    for tool in dict.fromkeys(name for row in rows for name in (*row.tools, *row.verdicts)):
        there = [row for row in rows if row.has_peak and tool in row.tools]
        errors = [row.error_of(row.tools[tool]) for row in there]
        verdicts = [row.verdicts[tool] == row.ran for row in rows if tool in row.verdicts and row.ran is not None]
        found = _line(tool, errors, verdicts, PUBLISHED_SECONDS.get(tool))
        yield found._replace(ours_there=Errors.of([row.error for row in there]))


def _line(tool: str, errors: list[float], right: list[bool], seconds: float | None) -> Line:
    return Line(tool, len(errors), Errors.of(errors), len(right) - sum(right), len(right), seconds)


def shortfall(row: Row) -> float:
    """The least margin under which this row's verdict could not have been a wrong "fits"."""
    return max(0.0, -row.error)
