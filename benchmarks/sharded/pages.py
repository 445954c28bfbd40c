"""The pages docs/en/sharded.md and docs/zh_cn/sharded.md, and the pictures of docs/*/many-gpus.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import pages
from benchmarks.harness.pages import GIB, Texts
from benchmarks.harness.records import Results, Row
from benchmarks.sharded import picture

TEXTS = pages.texts(Path(__file__).parent)

Figures = Mapping[str, Sequence[Mapping[str, Any]]]
"""What is no published row: "layouts", "scales", "plans" and "tools" -> rows."""


def summary(rows: Sequence[Row]) -> tuple[int, float, float]:
    """Number of rows that count, and the median and the largest of their absolute errors."""
    errors = [abs(row.error) for row in rows if row.judged]
    return len(errors), statistics.median(errors), max(errors)


def write_pages(results: Results, figures: Figures, docs: Path) -> list[Path]:
    """Write both pages and the pictures under ``docs``; the answer is their paths."""
    written = pages.write_pages("sharded.md", TEXTS, lambda words: page(results, figures, words), docs)
    for language, words in TEXTS.items():
        path = docs / "images" / f"layouts-{language}.svg"
        picture.write(figures["layouts"], words, path)
        written.append(path)
    return written


def renew_scales(figures: Figures, docs: Path) -> list[Path]:
    """Write the tables of 8B to 405B anew into both pages as they are; the answer is their paths."""
    written = []
    for language, words in TEXTS.items():
        path = docs / language / "sharded.md"
        text = path.read_text(encoding="utf-8")
        for made in _scale_tables(figures, words):
            head = made.partition("\n")[0]
            before, _, after = text.partition(head)
            text = before + made + "\n\n" + after.partition("\n\n")[2]
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _scale_tables(figures: Figures, words: Texts) -> tuple[str, str]:
    """Layouts as given, and as planned."""
    return (
        pages.table(words["scale_columns"], [_scale(row, words) for row in figures["scales"]]),
        pages.table(words["plan_columns"], [_planned(row, words) for row in figures["plans"]]),
    )


def page(results: Results, figures: Figures, words: Texts) -> str:
    """One page."""
    as_given, as_planned = _scale_tables(figures, words)
    judged = [row for row in results.rows if row.judged]
    others = [row for row in results.rows if not row.judged]
    count, median, worst = summary(results.rows)
    parts = [
        words["title"],
        words["made_by"].format(machine=pages.machine(results)),
        words["intro"],
        words["found"].format(count=count, median=f"{median:.3%}", worst=f"{worst:.2%}"),
        pages.table(words["columns"], [_line(row, words) for row in judged]),
        words["segments"],
        words["others"],
        pages.table([*words["columns"], words["why"]], [(*_line(row, words), _why(row, words)) for row in others]),
        words["real"],
        words["tools"],
        pages.table(words["tool_columns"], [line for row in figures["tools"] for line in _tools(row, words)]),
        words["scales"],
        as_given,
        words["plans"],
        as_planned,
        words["not_followed"],
        "\n".join(f"- {_plain(name)}: {_reason(why, words)}" for name, why in results.not_reproduced.items()),
    ]
    parts += [words["failed"].format(name=name) for name in results.failed]
    return "\n\n".join(parts) + "\n"


def _line(row: Row, words: Texts) -> tuple[str, ...]:
    facts = row.details
    digits = len(facts["gib"].partition(".")[2])

    def answer(kind: str) -> str:
        size = facts[kind]
        text = f"{size / GIB:.{max(digits, 2)}f} ({size / (row.measured or 1) - 1:+.2%})"
        return f"**{text}**" if facts[kind] == row.predicted and kind == _judge(facts) else text

    return (
        row.name,
        words[facts["measure"]] + ", " + words[facts["moment"]],
        facts["gib"],
        answer("default"),
        answer("expandable"),
        words[f"allocator_{facts['allocator']}"],
        facts["by"],
    )


def _judge(facts: Mapping[str, Any]) -> str:
    return "expandable" if facts["allocator"] == "expandable" else "default"


def _why(row: Row, words: Texts) -> str:
    return str(words["reasons"][row.details["why"]])


def _reason(why: str, words: Texts) -> str:
    return str(words["left_out"].get(why, why))


def _plain(text: str) -> str:
    return text.replace("**", "").replace("|", "/")


def _tools(row: Mapping[str, Any], words: Texts) -> list[tuple[str, ...]]:
    return [
        (
            words[row["name"]],
            words[tool],
            f"{row[tool]['peak'] / GIB:.2f} GiB" if "peak" in row[tool] else row[tool]["error"],
            f"{row[tool]['seconds']:.1f}" if "peak" in row[tool] else "-",
            f"{row[tool]['host'] / GIB:.2f} GiB" if "peak" in row[tool] else "-",
        )
        for tool in ("ours", "tracker")
    ]


def _scale(row: Mapping[str, Any], words: Texts) -> tuple[str, ...]:
    known = "default" in row
    return (
        row["model"],
        str(row["gpus"]),
        row["layout"],
        f"{row['batch']} × 8192",
        f"{row['default'] / GIB:.1f} / {row['expandable'] / GIB:.1f} GiB" if known else row.get("error", words["none"]),
        f"{row['step']:.1f} s ({row['exposed']:.1f} s)" if known else "-",
        f"{row['traced']:.0f} s ({row['processor']:.0f} s)" if known else "-",
        f"{row['host'] / GIB:.2f} GiB" if known else "-",
    )


def _planned(row: Mapping[str, Any], words: Texts) -> tuple[str, ...]:
    if "peak" not in row:
        return row["model"], str(row["gpus"]), row["error"], "-", "-", "-", "-", "-"
    return (
        row["model"],
        str(row["gpus"]),
        f"{row['layout']} {row['gpus']}" if row["layout"] == "FSDP2" else row["layout"],
        str(row["checkpointed"]),
        str(row["micro_batches"]),
        f"{row['peak'] / GIB:.1f} GiB" + ("" if row["fits"] else f" ({words['does_not_fit']})"),
        f"{row['step']:.1f} s ({row['exposed']:.1f} s)",
        f"{row['wall']:.0f} s ({row['processor']:.0f} s)",
    )
