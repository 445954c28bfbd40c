"""What the pages that benchmarks write have in common: one in each language, with tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Words(Protocol):
    """The texts of a page in one language."""

    @property
    def folder(self) -> str:
        """The language's folder under ``docs``."""


W = TypeVar("W", bound=Words)


def write_pages(
    report: dict[str, Any], docs: Path, name: str, languages: Iterable[W], page: Callable[[dict[str, Any], W], str]
) -> list[Path]:
    """Write the page ``name`` in each language under ``docs``; the answer is their paths."""
    written = []
    for words in languages:
        path = docs / words.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(report, words), encoding="utf-8")
        written.append(path)
    return written


def machine(report: dict[str, Any]) -> str:
    """Where the report was made."""
    found = report["machine"]
    return f"torch {found['torch']}, Python {found['python']}, CPU x {found['cores']}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
