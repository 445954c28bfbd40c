"""Writes docs/*/whole-job-scripts.md from ``scripts.json``: python -m benchmarks.whole_job.

``scripts.json`` has the answers of ``vram-guard launch --dry-run --json`` for each script, with releases and the date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import pages
from benchmarks.harness.pages import GIB, Texts

HERE = Path(__file__).parent

#: Columns with a peak: the first steps, what follows them, and the steps after that.
COLUMNS = ("setup", "training", "validation", "saving", "later")

Record = Mapping[str, Any]


def page(found: Record, words: Texts) -> str:
    """One page."""
    rows: list[Record] = found["scripts"]
    answered = [row for row in rows if "phases" in row]
    later = [row for row in answered if _column(_highest(row), row) not in ("setup", "training")]
    releases = ", ".join(f"{name} {release}" for name, release in found["releases"].items())
    parts = [
        words["title"],
        words["made_by"].format(date=found["date"], releases=releases, gpu=found["gpu"]),
        words["intro"],
        words["found"].format(scripts=len(rows), answered=len(answered), later=len(later)),
        pages.table(words["columns"], [_line(row) for row in answered]),
        words["why"],
        "\n".join(f"- `{row['name']}`: {_why(row, words)}" for row in answered),
    ]
    partial = [f"- `{row['name']}`: {row['not_followed']}" for row in answered if row.get("not_followed")]
    refused = [f"- `{row['name']}`: {row['refused']}" for row in rows if "refused" in row]
    if partial:
        parts += [words["not_followed"], "\n".join(partial)]
    if refused:
        parts += [words["refused"], "\n".join(refused)]
    edits = [f"- `{row['name']}`: {words['edits'][kind]}" for row in rows for kind in row["edits"]]
    parts += [words["edited"], "\n".join(edits)]
    return "\n\n".join(parts) + "\n"


def _highest(row: Record) -> Record:
    """The phase in which most is allocated, in MiB; of equal ones the first."""
    highest: Record = max(row["phases"], key=lambda phase: phase["peak_allocated"] >> 20)
    return highest


def _column(phase: Record, row: Record) -> str:
    first = next((other["step"] for other in row["phases"] if other["name"] == "training"), phase["step"])
    return "later" if phase["name"] == "training" and phase["step"] > first else str(phase["name"])


def _line(row: Record) -> tuple[str, ...]:
    def peak(column: str) -> str:
        sizes = [phase["peak_allocated"] for phase in row["phases"] if _column(phase, row) == column]
        if not sizes:
            return "-"
        text = f"{max(sizes) / GIB:.2f}"
        return f"**{text}**" if column == _column(_highest(row), row) else text

    return (
        f"{row['library']}: `{row['name']}`",
        *(peak(column) for column in COLUMNS),
        f"{row['peak_reserved'] / GIB:.2f}",
        f"{row['seconds']:.0f}",
    )


def _why(row: Record, words: Texts) -> str:
    highest = _highest(row)
    name = words["phases"][_column(highest, row)].format(step=highest["step"])
    facts = [f"`{highest[key]}`" for key in ("operator", "source", "module") if highest[key]]
    return ", ".join((name, *facts))


def main() -> None:
    """Write the pages."""
    found = json.loads((HERE / "scripts.json").read_text(encoding="utf-8"))
    for path in pages.write_pages(
        "whole-job-scripts.md", pages.texts(HERE), lambda words: page(found, words), pages.DOCS
    ):
        print(path)


if __name__ == "__main__":
    main()
