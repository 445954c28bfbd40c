"""Rows in columns as a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vram_guard.language import display_width, ljust, rjust


def columns(
    rows: Sequence[Sequence[str]], *, to_the_right: Callable[[int, str], bool], indent: int = 0
) -> Iterator[str]:
    """Lines of aligned cells; ``to_the_right`` says by column and text which of them are flush right."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            rjust(cell, width) if to_the_right(index, cell) else ljust(cell, width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " " * indent + "  ".join(cells).rstrip()
