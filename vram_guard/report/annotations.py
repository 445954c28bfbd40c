"""Checks that fail, as annotations that GitHub shows beside the line: workflow commands.

Source of the format: GitHub's toolkit for actions, ``packages/core/src/command.ts`` (escapes of commands and their
properties).
"""

from __future__ import annotations

from pathlib import Path

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.printable import printable

GITHUB = "github"


def check_annotations(value: str) -> None:
    """Refuse a format that is not known.

    Raises:
        InvalidInputError: it is not "github".
    """
    if value != GITHUB:
        raise InvalidInputError(_('annotations are "github", not {value}', value=repr(value)))


def annotation(message: str, source: str, otherwise: str = "", line: int = 1) -> str:
    """A failed check, as a line that GitHub's runners show beside the line of the user's code where the peak is.

    Args:
        message: the answer in words.
        source: the place of the peak, ``train.py:8``; "": not known.
        otherwise: the file that is meant where the source is none of this folder's.
        line: and its line.
    """
    file, _colon, number = source.rpartition(":")
    inside = _inside(file)
    if inside and number.isdecimal():
        line = int(number)
    else:
        inside = _inside(otherwise)
    place = f"file={_property(inside)},line={line}," if inside else ""
    return f"::error {place}title=vram_guard::{_data(printable(message))}"


def _inside(file: str) -> str:
    """The file as a path from here; "" where it is not there, or lies elsewhere."""
    if not file or not (path := Path(file).resolve()).is_file() or not path.is_relative_to(Path.cwd()):
        return ""
    return path.relative_to(Path.cwd()).as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
