"""The pages docs/en/peers.md and docs/zh_cn/peers.md, made from results whose sources are the tools."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

from benchmarks.harness import pages
from benchmarks.harness.pages import GIB, Texts
from benchmarks.harness.records import Results, Row, read
from benchmarks.harness.statistics import Errors

TEXTS = pages.texts(Path(__file__).parent)

#: What ``python -m benchmarks.peers.language_models`` wrote.
LANGUAGE_MODELS = Path(__file__).parent / "data" / "language_models.json"


def write_pages(results: Results, docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages("peers.md", TEXTS, lambda words: page(results, words), docs)


def by_workload(results: Results) -> dict[str, list[Row]]:
    """Title of a training step -> its rows, one for each tool."""
    titles = dict.fromkeys(row.name for row in results.rows)
    return {title: [row for row in results.rows if row.name == title] for title in titles}


def page(results: Results, words: Texts) -> str:
    """One page."""
    tools = dict(results.by_source())
    parts = [
        words["title"],
        words["made_by"].format(machine=pages.machine(results)),
        words["intro"],
        words["chart"],
        words["answers"],
        _answers(results, words),
        words["seconds"],
        pages.table(words["seconds_columns"], [_seconds(tool, rows) for tool, rows in tools.items()]),
        words["cannot"],
        pages.table(words["cannot_columns"], [(tool, words["limits"][tool]) for tool in tools]),
    ]
    reasons = _reasons(results)
    if reasons:
        parts += [words["reasons"], "\n".join(f"- {line}" for line in reasons)]
    parts += language_models(read(LANGUAGE_MODELS), words)
    parts += [words["published"], words["published_intro"]]
    parts.append(pages.table(words["published_columns"], words["published_rows"]))
    return "\n\n".join(parts) + "\n"


def language_models(results: Results, words: Texts) -> list[str]:
    """The section of the estimators that are formulas of a language model's sizes."""
    tools = dict(results.by_source())
    made_with = [f"{tool} ({', '.join(facts.values())})" for tool, facts in results.made_with.items()]
    rows = [
        (title, f"{rows[0].measured / GIB:.2f}" if rows[0].measured else "-", *(_answer(row, words) for row in rows))
        for title, rows in by_workload(results).items()
    ]
    return [
        words["formulas"],
        words["formulas_intro"].format(date=results.environment["date"], sources=", ".join(made_with)),
        pages.table((*words["columns"], *tools), rows),
        words["formulas_limits"],
        words["reasons"],
        "\n".join(f"- {line}" for line in _reasons(results)),
    ]


def _answers(results: Results, words: Texts) -> str:
    lines = []
    for title, rows in by_workload(results).items():
        measured = f"{rows[0].measured / GIB:.2f} ({rows[0].details['gpu']})" if rows[0].measured else "-"
        lines.append((title, measured, *(_answer(row, words) for row in rows)))
    tools = dict(results.by_source())
    lines.append((words["error"], "", *(_median_error(rows) for rows in tools.values())))
    return pages.table((*words["columns"], *tools), lines)


def _answer(row: Row, words: Texts) -> str:
    if row.predicted is None:
        return str(words["no_answer"])
    error = f" ({row.error:+.1%})" if row.measured else ""
    return f"{row.predicted / GIB:.2f}{error}"


def _median_error(rows: list[Row]) -> str:
    """Of the absolute errors, and over how many of the measured rows."""
    answered = [row.error for row in rows if row.has_peak]
    errors = Errors.of(answered)
    return f"{errors.median:.1%} ({len(answered)}/{sum(row.measured is not None for row in rows)})" if errors else "-"


def _seconds(tool: str, rows: list[Row]) -> tuple[str, ...]:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    times = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
    return (tool, *times, f"{len(seconds)}/{len(rows)}")


def _reasons(results: Results) -> list[str]:
    """Tool and reason, with the steps that it held for; those of one model are counted."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in results.rows:
        if row.predicted is None:
            found.setdefault((row.source, row.reason), Counter())[row.name.split(",")[0]] += 1
    steps = {
        reason: ", ".join(title if count == 1 else f"{count} x {title}" for title, count in titles.items())
        for reason, titles in found.items()
    }
    return [f"{tool}: {why} ({titles})" for (tool, why), titles in steps.items()]
