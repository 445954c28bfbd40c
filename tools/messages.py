"""Bring the translations up to date with the code, and compile them: ``make messages``.

Messages are found in the syntax tree, so that those inside f-strings and other messages' values count too. Messages
that the code no longer has are dropped, new ones wait for their translation with an empty ``msgstr``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "vram_guard", ROOT / "integrations")
CATALOGUE = ROOT / "vram_guard" / "locale" / "zh_CN" / "LC_MESSAGES" / "vram_guard.po"
#: argparse's own messages: written by hand, because they are in its code and not in ours.
ARGPARSE = CATALOGUE.with_name("argparse.po")
FUNCTIONS = ("_", "marked", "Message")


def calls() -> dict[str, ast.Call]:
    """Place ("vram_guard/units.py:70") -> a call with a message."""
    found = {}
    for path in (path for root in SOURCES for path in sorted(root.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
            if named and node.args and isinstance(node.args[0], ast.Constant):
                found[f"{path.relative_to(ROOT).as_posix()}:{node.lineno}:{node.col_offset}"] = node
    return found


def messages() -> set[str]:
    """Every message of the code."""
    return {node.args[0].value for node in calls().values()}  # type: ignore[attr-defined]


def updated() -> Catalog:
    """The catalogue with exactly the code's messages."""
    with CATALOGUE.open("rb") as file:
        before = read_po(file, locale="zh_CN")
    after = Catalog(locale="zh_CN", header_comment=before.header_comment, fuzzy=False)
    after.mime_headers = before.mime_headers
    for message in sorted(messages()):
        known = before.get(message)
        after.add(message, known.string if known else "", flags=known.flags if known else ())
    return after


def main() -> int:
    """Write catalogue and compiled catalogue; says what is not translated yet."""
    catalogue = updated()
    with CATALOGUE.open("wb") as file:
        write_po(file, catalogue, width=120, sort_output=True, omit_header=False)
    for path in (ARGPARSE, CATALOGUE):
        with path.open("rb") as file:
            catalogue = read_po(file, locale="zh_CN")
        with path.with_suffix(".mo").open("wb") as file:
            write_mo(file, catalogue)
    waiting = [message.id for message in catalogue if message.id and not message.string]
    for message in waiting:
        print(f"not translated: {message!r}")
    return 1 if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
