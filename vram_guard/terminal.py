"""Text as wide as a terminal shows it, in lines that end where the terminal's do."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from vram_guard.printable import printable

if TYPE_CHECKING:
    import logging

#: Words and single wide signs; what may not end a line stays with what follows, what may not begin one with the sign
#: before it.
_PIECES = re.compile(r"\s+|[（《“]*(?:[^\s\u2e80-\uffef]+|[\u2e80-\uffef])[，。；：、！？）》”]*")
#: What stands before the text of a line: spaces, and the sign or number of an item.
_BEFORE = re.compile(r"\s*(?:(?:[-+✓✅❌❓💡]|\d+\.)\s+)?")


def display_width(text: str) -> int:
    """Columns that a terminal gives to ``text``.

    Wide and full-width characters take two, combining ones none (Unicode Standard Annex 11, and what terminals do).
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream writes to; None: it writes to a file, a pipe or nowhere."""
    try:
        if not stream.isatty():
            return None
    except (AttributeError, ValueError):  # a stand-in of a script's own, or a closed stream
        return None
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a terminal that was told no size
    except (OSError, ValueError):
        return 80


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, broken at spaces and between wide signs, as one paragraph."""
    return _broken(" ".join(text.split()), width)


def wrapped_line(line: str, width: int) -> list[str]:
    """A line in lines of at most ``width`` columns, those after the first indented as its text is; words stay whole."""
    if display_width(line) <= width:
        return [line]
    found = _BEFORE.match(line)
    before = found[0] if found else ""
    indent = display_width(before)
    first, *rest = _broken(line.removeprefix(before), width - indent)
    return [before + first, *(" " * indent + one for one in rest)]


def fitting(text: str, stream: TextIO) -> str:
    """``text`` with lines that the terminal behind ``stream`` can show, items indented; without a terminal, as it is.

    A word that is wider than the terminal, such as a path, is left whole, so that it can be copied.
    """
    width = terminal_width(stream)
    if width is None:
        return text
    return "\n".join(broken for line in text.split("\n") for broken in wrapped_line(line, width))


def encodable(text: str, stream: TextIO) -> str:
    """``text`` as a stream can take it: signs that its encoding does not have become question marks."""
    return _in_encoding(text, getattr(stream, "encoding", None) or "utf-8")


def in_log(text: str, logger: logging.Logger) -> str:
    """``text`` for people as every stream of a log can take it.

    ``logging`` prints a traceback in place of a record that one of its streams cannot encode.
    """
    text = printable(text)
    for encoding in encodings_of(logger):
        text = _in_encoding(text, encoding)
    return text


def fitting_log(text: str, logger: logging.Logger) -> str:
    """``text`` as :func:`fitting` has it where a log goes to a terminal; else its sentences stay whole, to be found."""
    for handler in _handlers(logger):
        stream = getattr(handler, "stream", None)
        text = text if stream is None else fitting(text, stream)
    return text


def encodings_of(logger: logging.Logger) -> Iterator[str]:
    """The encoding of each stream that a logger's records are written to."""
    import locale

    for handler in _handlers(logger):
        # A file that is opened with the first record has no stream yet.
        told = getattr(getattr(handler, "stream", None) or handler, "encoding", None) or "utf-8"
        yield locale.getpreferredencoding(do_setlocale=False) if told == "locale" else told


def shown_on(text: str, stream: TextIO) -> str:
    """``text`` for people: nothing that a terminal would obey, its lines as :func:`fitting` has them, encodable."""
    return encodable(fitting(printable(text), stream), stream)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    one: logging.Logger | None = logger
    while one is not None:
        yield from one.handlers
        one = one.parent if one.propagate else None


def _in_encoding(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _broken(text: str, width: int) -> list[str]:
    lines, used = [""], 0
    for piece in _PIECES.findall(text):
        size = display_width(piece)
        if used and used + size > width and not piece.isspace():
            lines, used = [*lines, ""], 0
        if used or not piece.isspace():
            lines[-1] += piece
            used += size
    return [line.rstrip() for line in lines]
