"""The pages docs/en/recorded.md and docs/zh_cn/recorded.md, made from replays and predictions of recorded runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import pages
from benchmarks.harness.pages import Texts
from benchmarks.harness.records import Results, Row

TEXTS = pages.texts(Path(__file__).parent)


def is_prediction(row: Row) -> bool:
    """True for a row that was predicted from a model, False for a replayed history."""
    return "in_order" in row.details


def write_pages(results: Results, docs: Path) -> list[Path]:
    """Write both pages under ``docs``; the answer is their paths."""
    return pages.write_pages("recorded.md", TEXTS, lambda words: page(results, words), docs)


def page(results: Results, words: Texts) -> str:
    """One page."""
    predictions = [row for row in results.rows if is_prediction(row)]
    replays = [row for row in results.rows if not is_prediction(row)]
    equal = sum(row.predicted == row.measured for row in predictions)
    programs = [row for row in predictions if row.details["program"] is not None]
    parts = [
        words["title"],
        words["made_by"].format(machine=pages.machine(results)),
        words["intro"],
        words["predictions"],
        pages.table(words["prediction_columns"], [_prediction(row, words) for row in predictions]),
        words["found"].format(
            equal=equal,
            count=len(predictions),
            programs=len(programs),
            equal_programs=sum(row.details["program"] == row.measured for row in programs),
        ),
        words["why"],
        words["in_order"],
        words["replays"],
        pages.table(words["replay_columns"], [_replay(row, words) for row in replays]),
        words["own"],
        words["sources"],
    ]
    return "\n\n".join(parts) + "\n"


def _prediction(row: Row, words: Texts) -> tuple[str, ...]:
    facts = row.details
    recorded = row.measured or 0
    return (
        row.name,
        f"{recorded:,}",
        _compared(row.predicted, recorded, words),
        _compared(facts["program"], recorded, words),
        _compared(facts["predicted_allocated"], facts["allocated"], words),
        f"{facts['in_order']:.2%}",
    )


def _compared(size: int | None, recorded: int, words: Texts) -> str:
    if size is None:
        return "-"
    return str(words["equal"]) if size == recorded else f"{size:,} ({size / recorded - 1:+.3%})"


def _replay(row: Row, words: Texts) -> tuple[str, ...]:
    facts = row.details
    return (
        row.name,
        str(facts["device"]),
        f"{facts['actions']:,}",
        f"{facts['segments']:,}",
        f"{row.measured:,}",
        _compared(row.predicted, row.measured or 0, words),
        str(words["yes" if facts["same_segments"] else "no"]),
        str(words["yes" if facts["same_addresses"] else "no"]),
    )
