"""Tables and sentences of the documentation that are made from results.

In a page of ``docs/lab`` they stand between ``<!-- table: NAME -->`` and ``<!-- end -->``. A table keeps its head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.records import Results
from vram_guard.errors import InvalidInputError

DOCS = Path(__file__).parents[2] / "docs"

GIB, MIB = 2**30, 2**20

#: The rows of a table, or a sentence.
Made = Iterable[Sequence[str]] | str

_BLOCK = "(<!-- table: {name} -->\n).*?(<!-- end -->)"


def fill(page: str, contents: Mapping[str, Made], docs: Path = DOCS, note: str = "") -> None:
    """Fill in a page, and print its path.

    Args:
        page: the file's name in ``docs/lab``.
        contents: name of a place -> what stands there.
        docs: the folder of the documentation.
        note: a sentence below each table.

    Raises:
        InvalidInputError: the page has no such place, or several.
    """
    path = docs / "lab" / page
    text = path.read_text(encoding="utf-8")
    for name, made in contents.items():
        text = _filled(text, name, made, note, path)
    path.write_text(text, encoding="utf-8")
    print(path)


def _filled(text: str, name: str, made: Made, note: str, path: Path) -> str:
    pattern = re.compile(_BLOCK.format(name=re.escape(name)), flags=re.DOTALL)
    places = pattern.findall(text)
    if len(places) != 1:
        raise InvalidInputError(f"{path} has {len(places)} places for the table {name}")

    def block(match: re.Match[str]) -> str:
        if isinstance(made, str):
            return f"{match[1]}\n{made}\n\n{match[2]}"
        head = [line for line in match[0].splitlines() if line.startswith("|")][:2]
        lines = [*head, *("| " + " | ".join(row) + " |" for row in made), *(["", note] if note else [])]
        return "\n".join([f"{match[1]}", *lines, "", match[2]])

    return pattern.sub(block, text)


def machine(results: Results) -> str:
    """The machine that the results were made on."""
    found = results.environment
    return f"torch {found['torch']}, Python {found['python']}, CPU x {found['cores']}"
