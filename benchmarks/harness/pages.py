"""Tables and sentences of the documentation that are made from results.

In a page they stand between ``<!-- table: NAME -->`` and ``<!-- end -->``. A table keeps its head, in the language of
its page; the texts that are made are English, and ``words.json`` has them in the other languages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.records import Results
from vram_guard.errors import InvalidInputError

DOCS = Path(__file__).parents[2] / "docs"

GIB, MIB = 2**30, 2**20

#: (English text, its values) -> the text in the language of a page.
Say = Callable[..., str]

#: The rows of a table, or a sentence.
Made = Iterable[Sequence[str]] | str

_BLOCK = "(<!-- table: {name} -->\n).*?(<!-- end -->)"
WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def fill(
    page: str, makers: Mapping[str, Callable[[Say], Made]], docs: Path = DOCS, note: str = "", **facts: Any
) -> None:
    """Fill in the page in every folder of ``docs`` that has it, and print its paths.

    Args:
        page: the file's name.
        makers: name of a place -> what makes its contents.
        docs: folder with a folder for each language.
        note: a sentence below each table.
        facts: its values.

    Raises:
        InvalidInputError: a page has no such place, or several.
    """
    for path in sorted(docs.glob(f"*/{page}")):
        words = WORDS.get(path.parent.name, {})

        def say(english: str, words: Mapping[str, str] = words, **values: Any) -> str:
            return words.get(english, english).format(**values)

        text = path.read_text(encoding="utf-8")
        for name, make in makers.items():
            text = _filled(text, name, make(say), say(note, **facts), path)
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


def listed(lines: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)
