"""The one table of this folder: errors and wrong verdicts, source by source and tool by tool."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from records import Results, Row, of_source

OURS = "vram_guard"

#: Seconds for one estimate that the tools' authors state themselves (xMem's paper, its runtime table).
PUBLISHED_SECONDS = {"xmem": 24.0, "dnnmem": 36.0}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Line(NamedTuple):
    """One tool on one group of rows; None: not to be said."""

    source: str
    tool: str
    rows: int
    median: float | None
    p90: float | None
    bias: float | None
    wrong: int
    verdicts: int
    seconds: float | None
    ours_there: tuple[float, float] | None = None
    """Our median and 90th percentile on the rows that this tool has an answer for."""


def lines(rows: Sequence[Row]) -> Iterator[Line]:
    """One line for us and one for each other tool, for each source."""
    for source, group in of_source(list(rows)):
        yield _ours(source, group)
        for tool in dict.fromkeys(name for row in group for name in (*row.tools, *row.verdicts)):
            yield _theirs(source, tool, group)


def _ours(source: str, group: Sequence[Row]) -> Line:
    errors = [row.error for row in group if row.has_peak]
    verdicts = [row.fits == row.ran for row in group if row.fits is not None and row.ran is not None]
    return _line(source, OURS, errors, verdicts, statistics.mean(row.seconds for row in group))


def _theirs(source: str, tool: str, group: Sequence[Row]) -> Line:
    there = [row for row in group if row.has_peak and tool in row.tools]
    errors = [row.tools[tool] / (row.measured or 1) - 1 for row in there]
    verdicts = [row.verdicts[tool] == row.ran for row in group if tool in row.verdicts and row.ran is not None]
    found = _line(source, tool, errors, verdicts, PUBLISHED_SECONDS.get(tool))
    if not there:
        return found
    ours = [abs(row.error) for row in there]
    return found._replace(ours_there=(statistics.median(ours), quantile(ours, 0.9)))


def _line(source: str, tool: str, errors: list[float], right: list[bool], seconds: float | None) -> Line:
    absolute = [abs(error) for error in errors]
    return Line(
        source,
        tool,
        len(errors),
        statistics.median(absolute) if errors else None,
        quantile(absolute, 0.9) if errors else None,
        statistics.median(errors) if errors else None,
        len(right) - sum(right),
        len(right),
        seconds,
    )


def print_table(results: Results) -> None:
    """The table, what could not be reproduced and why, and what failed with its traceback."""
    head = f"{'tool':24}{'rows':>5}{'median':>9}{'p90':>9}{'bias':>9}{'wrong verdicts':>18}{'s/estimate':>12}"
    source = ""
    for line in lines(results.rows):
        if line.source != source:
            source = line.source
            made = results.made_with.get(source, {})
            print(f"\n{source}  [{', '.join(f'{name} {version}' for name, version in made.items())}]\n{head}")
        print(_text(line))
    for name, reason in results.not_reproduced.items():
        print(f"not reproduced: {name}: {reason}")
    for name, traceback in results.failed.items():
        print(f"FAILED: {name}\n{traceback}")


def _text(line: Line) -> str:
    share = "-" if line.median is None or line.p90 is None or line.bias is None else ""
    numbers = share or f"{line.median:9.3%}{line.p90:9.3%}{line.bias:+9.3%}"
    wrong = f"{line.wrong}/{line.verdicts} {line.wrong / line.verdicts:.1%}" if line.verdicts else "-"
    took = f"{line.seconds:.2f}" if line.seconds is not None else "-"
    there = f"   (ours there: {line.ours_there[0]:.2%}, {line.ours_there[1]:.2%})" if line.ours_there else ""
    return f"{line.tool[:24]:24}{line.rows:5}{numbers:>27}{wrong:>18}{took:>12}{there}"


def as_json(rows: Sequence[Row]) -> list[Mapping[str, object]]:
    """The table's lines for other programs."""
    return [line._asdict() for line in lines(rows)]
