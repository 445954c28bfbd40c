"""Lines of a report on streams of every kind: terminals, files, pipes, other encodings than UTF-8."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TextIO

from vram_guard.printable import printable
from vram_guard.terminal import encodable, terminal_width, wrapped_line


class Line(NamedTuple):
    """A line, and how a terminal shows it: parameters of ECMA-48's SGR, such as "1;32" for bold and green."""

    text: str
    style: str = ""


def in_lines(text: str, width: int, style: str = "") -> Iterator[Line]:
    """A text, whatever characters it has, in lines of at most so many columns."""
    for line in printable(text).split("\n"):
        yield from (Line(one, style) for one in wrapped_line(line, width))


def as_text(lines: Iterable[Line]) -> str:
    """The lines without styles, and without spaces at their ends."""
    return "".join(f"{line.text.rstrip()}\n" for line in lines)


def show(report: Callable[[int], Iterable[Line]], width: int, file: TextIO | None = None) -> bool:
    """Print a report whatever the stream is, in colour where that is a terminal.

    Args:
        report: makes it, in so many columns.
        width: columns where the stream is not a terminal.
        file: the stream; None: standard output.

    Returns:
        False where the stream is no longer read; training must not end because of that.
    """
    stream = file or sys.stdout
    columns = terminal_width(stream)
    lines = report(columns or width)
    if columns is not None and os.name == "posix" and "NO_COLOR" not in os.environ:
        lines = [Line(f"\x1b[{line.style}m{line.text}\x1b[0m" if line.style else line.text) for line in lines]
    try:
        stream.write(encodable(as_text(lines), stream))
        stream.flush()
    except (BrokenPipeError, ValueError):  # ValueError: the stream was closed on our side
        return False
    return True
