"""The table of errors and wrong verdicts, source by source and tool by tool."""

from __future__ import annotations

from benchmarks.harness.records import Results
from benchmarks.harness.statistics import Line, lines


def print_table(results: Results) -> None:
    """The table, what could not be reproduced and why, and what failed with its traceback."""
    head = f"{'tool':24}{'rows':>5}{'median':>9}{'p90':>9}{'bias':>9}{'wrong verdicts':>18}{'s/estimate':>12}"
    for source, rows in results.by_source():
        made = results.made_with.get(source, {})
        print(f"\n{source}  [{', '.join(f'{name} {version}' for name, version in made.items())}]\n{head}")
        for line in lines(rows):
            print(_text(line))
    for name, reason in results.not_reproduced.items():
        print(f"not reproduced: {name}: {reason}")
    for name, traceback in results.failed.items():
        print(f"FAILED: {name}\n{traceback}")


def _text(line: Line) -> str:
    numbers = "-" if line.errors is None else str(line.errors)
    wrong = f"{line.wrong}/{line.verdicts} {line.wrong / line.verdicts:.1%}" if line.verdicts else "-"
    took = f"{line.seconds:.2f}" if line.seconds is not None else "-"
    ours = line.ours_there
    there = f"   (ours there: {ours.median:.2%}, {ours.p90:.2%})" if ours else ""
    return f"{line.tool[:24]:24}{line.rows:5}{numbers:>27}{wrong:>18}{took:>12}{there}"
