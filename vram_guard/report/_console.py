"""Reports of rich on streams of every kind: terminals, files, pipes, other encodings than UTF-8."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from vram_guard.printable import printable
from vram_guard.terminal import display_width, encodable, is_utf, wrapped

if TYPE_CHECKING:
    from rich.containers import Lines


def as_text(report: RenderableType, width: int) -> str:
    """The report as plain text, without spaces at the ends of lines."""
    plain = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    with plain.capture() as captured:
        plain.print(report)
    return "\n".join(line.rstrip() for line in printable(captured.get()).splitlines()) + "\n"


def words(text: str, style: str = "") -> Text:
    """Text without markup, whatever characters it has."""
    return _Words(printable(text), style=style)


class _Words(Text):
    """Text of one style, broken as all other lines of ours: between wide signs too, where rich knows only spaces."""

    def wrap(self, console: Console, width: int, **how: Any) -> Lines:
        """Lines of at most ``width`` columns."""
        if self.plain.isascii() or how.get("no_wrap"):
            return super().wrap(console, width, **how)
        # A line that is short enough stays as it is: the spaces in it may be those of a table.
        lines = [[line] if display_width(line) <= width else wrapped(line, width) for line in self.plain.split("\n")]
        broken = "\n".join(one for line in lines for one in line)
        return Text(broken, self.style).wrap(console, width, **how)


def is_unicode(encoding: str | None = None) -> bool:
    """True if more than ASCII can be drawn in an encoding; None: in standard output's."""
    return is_utf(encoding or getattr(sys.stdout, "encoding", None) or "utf-8")


def show(report: Callable[[bool], RenderableType], width: int, file: TextIO | None = None) -> bool:
    """Print a report whatever the stream is, in colour where that is a terminal.

    Args:
        report: makes it, with more than ASCII or without.
        width: columns where the stream is not a terminal.
        file: the stream; None: standard output.

    Returns:
        False where the stream is no longer read; training must not end because of that.
    """
    stream = file or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        if stream.isatty() and is_unicode(encoding):
            Console(file=stream).print(report(True))
        else:
            stream.write(encodable(as_text(report(is_unicode(encoding)), width), stream))
        stream.flush()
    except (BrokenPipeError, ValueError):  # ValueError: the stream was closed on our side
        return False
    return True
