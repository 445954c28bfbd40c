"""Progress in one line, at a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vram_guard.printable import printable
from vram_guard.terminal import cut, display_width, encodable, ljust, terminal_width


@contextmanager
def one_line() -> Iterator[Callable[[str], None]]:
    """A callback for ``progress=``: each line replaces the one before, at a terminal and in a notebook's output.

    Where standard error is neither (a log file), nothing is written.
    """
    stream: Any = sys.stderr
    if not (stream.isatty() or type(stream).__module__.startswith("ipykernel.")):
        yield lambda _line: None
        return
    width = 0
    # A line that a terminal breaks cannot be replaced: a return leads to the beginning of its last row.
    most = terminal_width(stream)

    def show(line: str) -> None:
        nonlocal width
        text = printable(line, lines=False)
        text = text if most is None else cut(text, most - 1)
        stream.write(f"\r{encodable(ljust(text, width), stream)}")
        stream.flush()
        width = display_width(text)

    try:
        yield show
    finally:
        if width:
            stream.write(f"\r{' ' * width}\r")
            stream.flush()
