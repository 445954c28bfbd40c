"""Writes docs/*/launches.md from ``results.json``: python -m benchmarks.launches.

``results.json`` has, for each script, what ``vram-guard launch --json`` answered under a budget that it does not fit
as written, and by how much the weights after this launch differ from those after the script alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import pages
from benchmarks.harness.pages import Texts

HERE = Path(__file__).parent
MIB = 2**20

Record = Mapping[str, Any]


def page(found: Record, words: Texts) -> str:
    """One page."""
    rows: list[Record] = found["scripts"]
    trained = [row for row in rows if "difference" in row]
    equal = [row for row in trained if row["difference"] <= words["rounding"]]
    answered = [row for row in rows if row["as_written"]]
    releases = ", ".join(f"{name} {release}" for name, release in found["releases"].items())
    sources = "\n".join(f"- {name}: {source}" for name, source in found["sources"].items())
    parts = [
        words["title"],
        words["made_by"].format(date=found["date"], releases=releases),
        words["intro"],
        words["found"].format(
            scripts=len(rows), answered=len(answered), trained=len(trained), equal=len(equal),
            not_started=sum(row["outcome"] not in ("trained", "time") for row in rows),
        ),
        pages.table(words["columns"], [_line(row, words) for row in rows]),
        words["words"],
        "\n".join(f"- `{row['name']}`: {row['said']}" for row in rows if row.get("said")),
        words["edited"],
        "\n".join(f"- `{row['name']}`: {words['edits'][kind]}" for row in rows for kind in row["edits"]),
        words["commands"],
        "\n".join(f"- {row['library']}: `{' '.join([row['script'], *row['arguments']])}`" for row in rows),
        words["sources"],
        sources,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _line(row: Record, words: Texts) -> tuple[str, ...]:
    def size(key: str) -> str:
        return f"{row[key] / MIB:.0f}" if row.get(key) else "-"

    plan = "; ".join(_plan(row["plan"], words["plan"])) if row.get("plan") else words["no_plan"][row["outcome"]]
    steps = str(row["steps"]) if "steps" in row else "-"
    difference = f"{row['difference']:.1g}" if row.get("difference") else words["equal"]
    return (
        f"{row['library']}: `{row['name']}`", size("as_written"), size("budget"), size("planned"), plan, steps,
        difference if "difference" in row else "-",
    )  # fmt: skip


def _plan(plan: Record, words: Texts) -> Iterator[str]:
    """What a plan changes, kind by kind."""
    if plan["options"]:
        yield words["options"].format(options=" ".join(plan["options"]))
    elif plan["micro_batches"] > 1:
        yield words["micro_batches"].format(count=plan["micro_batches"])
    for kind in ("checkpointed", "on_host"):
        if plan[kind]:
            yield words[kind].format(count=plan[kind])
    if plan["foreach"]:
        yield words["foreach"]


def main() -> None:
    """Write the pages."""
    found = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    for path in pages.write_pages("launches.md", pages.texts(HERE), lambda words: page(found, words), pages.DOCS):
        print(path)


if __name__ == "__main__":
    main()
