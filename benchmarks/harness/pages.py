"""Pages that benchmarks write: one in each language, with tables in Markdown.

A page's texts lie next to its module in ``page.json``: language (its folder under ``docs``) -> name -> text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import Results

DOCS = Path(__file__).parents[2] / "docs"

GIB = 2**30

Texts = Mapping[str, Any]


def texts(folder: Path) -> dict[str, Texts]:
    """Language -> the texts of the page whose benchmark lies in the folder."""
    found: dict[str, Texts] = json.loads((folder / "page.json").read_text(encoding="utf-8"))
    return found


def write_pages(name: str, languages: Mapping[str, Texts], page: Callable[[Texts], str], docs: Path) -> list[Path]:
    """Write the page ``name`` in each language under ``docs``; the answer is their paths."""
    written = []
    for language, words in languages.items():
        path = docs / language / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(words), encoding="utf-8")
        written.append(path)
    return written


def machine(results: Results) -> str:
    """The machine that the results were made on."""
    found = results.environment
    return f"torch {found['torch']}, Python {found['python']}, CPU x {found['cores']}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
