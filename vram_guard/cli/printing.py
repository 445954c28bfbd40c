"""How commands answer: JSON for programs, aligned columns for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vram_guard.language import _, display_width, ljust, rjust

#: The format of every ``--json`` answer; raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def in_words(value: object) -> str:
    """A value for people."""
    return (_("yes") if value else _("no")) if isinstance(value, bool) else str(value)


def print_json(answer: dict[str, Any]) -> None:
    """The answer for programs, with the version of its format."""
    print(json.dumps({"schema": JSON_SCHEMA, **answer}, indent=2))


def print_columns(rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Rows as aligned columns: the first ``left`` flush left, the others flush right."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            ljust(cell, width) if index < left else rjust(cell, width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
