"""argparse in the reader's language: its own words, and help that is broken where a terminal's lines end."""

from __future__ import annotations

import argparse
import gettext
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from vram_guard.language import ENGLISH, LOCALE, display_width, language
from vram_guard.printable import printable

#: The catalogue of argparse's own messages.
DOMAIN = "argparse"
#: Words and single wide signs; what may not begin a line stays with the sign before it.
_PIECES = re.compile(r"\s+|[^\s\u2e80-\uffef]+|[\u2e80-\uffef][，。；：、！？）》”]*")


class Parser(argparse.ArgumentParser):
    """A parser whose help reckons with wide characters."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", Formatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """The message may quote what was typed, or read from a script."""
        super().error(printable(message))


class Formatter(argparse.HelpFormatter):
    """Help whose lines are as wide as they are shown."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in wrapped(text, width - len(indent)))


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns of a terminal, where it has a place to break."""
    lines, used = [""], 0
    for piece in _PIECES.findall(text):
        if piece.isspace():
            piece = " "  # noqa: PLW2901 - line breaks of the source are none of the text
        size = display_width(piece)
        if used and used + size > width:
            lines, used = [*lines, ""], 0
        if piece == " " and not used:
            continue
        lines[-1] += piece
        used += size
    return [line.rstrip() for line in lines]


@contextmanager
def argparse_locale() -> Iterator[None]:
    """Translate argparse's own messages ("usage", errors) within a ``with`` block.

    argparse looks its messages up in the process's gettext domain, in the language of the environment.
    """
    if language() == ENGLISH:
        yield
        return
    domain, variable = gettext.textdomain(), os.environ.get("LANGUAGE")
    gettext.bindtextdomain(DOMAIN, str(LOCALE))
    gettext.textdomain(DOMAIN)
    os.environ["LANGUAGE"] = language()
    try:
        yield
    finally:
        gettext.textdomain(domain)
        if variable is None:
            del os.environ["LANGUAGE"]
        else:
            os.environ["LANGUAGE"] = variable
