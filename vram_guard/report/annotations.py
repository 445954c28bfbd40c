"""Checks that fail, as annotations that a forge or an editor shows beside the line: GitHub's workflow commands, SARIF.

Sources of the formats: GitHub's toolkit for actions, ``packages/core/src/command.ts`` (escapes of commands and their
properties); the OASIS standard Static Analysis Results Interchange Format (SARIF) 2.1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.printable import printable
from vram_guard.report.files import write_atomically

#: The format that goes to a log; every other one is a file.
GITHUB = "github"
RULE = "does-not-fit"


class Finding(NamedTuple):
    """A check that failed."""

    message: str
    file: str
    """Relative to the folder of the project, with slashes; "": none is known."""
    line: int = 1


def check_annotations(value: str) -> None:
    """Refuse a format that is not known.

    Raises:
        InvalidInputError: it is neither "github" nor a file that ends in .sarif.
    """
    if value != GITHUB and Path(value).suffix != ".sarif":
        raise InvalidInputError(_('annotations are "github" or a file NAME.sarif, not {value}', value=repr(value)))


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


def annotate(findings: Sequence[Finding], where: str) -> str:
    """Write the findings into the file that ``where`` names; returns the lines for the log, "" for a file.

    A file is written where nothing failed too: its reader then knows that earlier findings are mended.
    """
    if where == GITHUB:
        return "\n".join(map(workflow_command, findings))
    write_atomically(where, json.dumps(sarif(findings), indent=2) + "\n")
    return ""


def workflow_command(one: Finding) -> str:
    """The finding as a line that GitHub's runners turn into an annotation."""
    title = "title=vram_guard"
    place = f"file={_property(one.file)},line={one.line},{title}" if one.file else title
    return f"::error {place}::{_data(printable(one.message))}"


def sarif(findings: Iterable[Finding]) -> dict[str, object]:
    """The findings as a log of SARIF 2.1.0."""
    rule = {"id": RULE, "shortDescription": {"text": _("A training step needs more GPU memory than there is.")}}
    driver = {"name": "vram_guard", "rules": [rule]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(one) for one in findings]}],
    }


def _result(one: Finding) -> dict[str, object]:
    from urllib.parse import quote

    place = {"artifactLocation": {"uri": quote(one.file)}, "region": {"startLine": one.line}}
    where = {"locations": [{"physicalLocation": place}]} if one.file else {}
    return {"ruleId": RULE, "level": "error", "message": {"text": printable(one.message)}, **where}


def _inside(file: str) -> str:
    """The file as a path from here; "" where it is not there, or lies elsewhere."""
    if not file or not (path := Path(file).resolve()).is_file() or not path.is_relative_to(Path.cwd()):
        return ""
    return path.relative_to(Path.cwd()).as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
