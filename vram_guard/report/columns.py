"""Rows in columns as a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vram_guard.terminal import display_width, ljust, rjust, wrapped

_Rows = Sequence[Sequence[str]]
#: A column of words is not broken into lines shorter than this.
_LEAST = 12


def columns(
    rows: _Rows, *, to_the_right: Callable[[int, str], bool], indent: int = 0, width: int | None = None
) -> Iterator[str]:
    """Lines of aligned cells; ``to_the_right`` says by column and text which of them are flush right.

    Args:
        rows: of equally many cells.
        to_the_right: column and cell -> whether the cell is flush right.
        indent: spaces before each line.
        width: columns of the terminal, which the lines are to fit: less space between cells, else the longest texts
            over several lines, else the last columns below the others. None: as wide as they are.
    """
    gap = 2
    if width is not None and _total(rows, gap, indent) > width:
        if _total(rows, 1, indent) <= width:
            gap = 1
        else:
            shorter = _broken(rows, to_the_right, width - _total(rows, gap, indent))
            if shorter is None:
                yield from _below_each_other(rows, to_the_right, indent, width)
                return
            rows = shorter
    widths = _widths(rows)
    for row in rows:
        cells = [
            rjust(cell, room) if to_the_right(index, cell) else ljust(cell, room)
            for index, (cell, room) in enumerate(zip(row, widths, strict=True))
        ]
        yield " " * indent + (" " * gap).join(cells).rstrip()


def _widths(rows: _Rows) -> list[int]:
    return [max(map(display_width, column)) for column in zip(*rows, strict=True)]


def _total(rows: _Rows, gap: int, indent: int) -> int:
    widths = _widths(rows)
    return indent + sum(widths) + gap * (len(widths) - 1)


def _broken(rows: _Rows, to_the_right: Callable[[int, str], bool], more: int) -> list[list[str]] | None:
    """The rows with the widest column of words ``more`` (negative) wider; None where that is too narrow."""
    words = [
        index
        for index, column in enumerate(zip(*rows, strict=True))
        if not any(to_the_right(index, cell) for cell in column)
    ]
    if not words:
        return None
    widths = _widths(rows)
    widest = max(words, key=widths.__getitem__)
    room = widths[widest] + more
    if room < _LEAST:
        return None
    made: list[list[str]] = []
    for row in rows:
        first, *rest = _folded(row[widest], room)
        made.append([*row[:widest], first, *row[widest + 1 :]])
        made += [[""] * widest + [line] + [""] * (len(row) - widest - 1) for line in rest]
    return made


def _folded(text: str, room: int) -> Iterator[str]:
    """Lines of at most so many columns; words that are wider are broken, such as paths."""
    for line in wrapped(text, room):
        part = ""
        for sign in line:
            if display_width(part + sign) > room:
                yield part
                part = ""
            part += sign
        yield part


def _below_each_other(rows: _Rows, to_the_right: Callable[[int, str], bool], indent: int, width: int) -> Iterator[str]:
    """As many columns as fit, and then the others, each time with the first one before them."""
    widths = _widths(rows)
    start = 1
    while start < len(widths):
        end, used = start + 1, indent + widths[0] + 2 + widths[start]
        while end < len(widths) and used + 2 + widths[end] <= width:
            used, end = used + 2 + widths[end], end + 1
        if start > 1:
            yield ""
        shown, first = [[row[0], *row[start:end]] for row in rows], start
        yield from columns(
            shown,
            to_the_right=lambda index, cell, first=first: to_the_right(index and first + index - 1, cell),  # type: ignore[misc]
            indent=indent,
        )
        start = end
