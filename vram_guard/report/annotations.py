"""Checks that fail, as annotations that GitHub shows beside the line: workflow commands.

Source of the format: GitHub's toolkit for actions, ``packages/core/src/command.ts`` (escapes of commands and their
properties).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.printable import printable

GITHUB = "github"


class Finding(NamedTuple):
    """A check that failed."""

    message: str
    file: str
    """Relative to the folder of the project, with slashes; "": none is known."""
    line: int = 1


def check_annotations(value: str) -> None:
    """Refuse a format that is not known.

    Raises:
        InvalidInputError: it is not "github".
    """
    if value != GITHUB:
        raise InvalidInputError(_('annotations are "github", not {value}', value=repr(value)))


def finding(message: str, source: str, otherwise: str = "", line: int = 1) -> Finding:
    """A failed check, beside the line of the user's code where the peak is.

    Args:
        message: the answer in words.
        source: the place of the peak, ``train.py:8``; "": not known.
        otherwise: the file that is meant where the source is none of this folder's.
        line: and its line.
    """
    file, _colon, number = source.rpartition(":")
    inside = _inside(file)
    if inside and number.isdecimal():
        return Finding(message, inside, int(number))
    return Finding(message, _inside(otherwise), line)


def workflow_command(one: Finding) -> str:
    """The finding as a line that GitHub's runners turn into an annotation."""
    title = "title=vram_guard"
    place = f"file={_property(one.file)},line={one.line},{title}" if one.file else title
    return f"::error {place}::{_data(printable(one.message))}"


def _inside(file: str) -> str:
    """The file as a path from here; "" where it is not there, or lies elsewhere."""
    if not file or not (path := Path(file).resolve()).is_file() or not path.is_relative_to(Path.cwd()):
        return ""
    return path.relative_to(Path.cwd()).as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
