"""Rows in columns as a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Columns of what is no terminal: every row is one line.
_ENDLESS = 100_000


def columns(
    rows: Sequence[Sequence[str]],
    *,
    to_the_right: Callable[[int, str], bool],
    indent: int = 0,
    width: int | None = None,
) -> list[str]:
    """Lines of aligned cells; where they are too wide, the widest cells stand in several lines.

    Args:
        rows: of equally many cells.
        to_the_right: column and cell -> whether the cell is flush right.
        indent: spaces before each line.
        width: columns of the terminal, which the lines are to fit; None: as wide as they are.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for row in rows:
        cells = (
            Text(cell, justify="right" if to_the_right(at, cell) else "left", overflow="fold")
            for at, cell in enumerate(row)
        )
        table.add_row(*cells)
    console = Console(width=(width or _ENDLESS) - indent, color_system=None, force_jupyter=False, legacy_windows=False)
    with console.capture() as shown:
        console.print(table)
    return [(" " * indent + line).rstrip() for line in shown.get().removesuffix("\n").split("\n")]
