"""Files that are either whole or not there, and whose loss never costs the result."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate, Timeline


class NotWrittenWarning(UserWarning):
    """A report could not be written (read-only folder, full disk); what it reports still holds."""


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> bool:
    """Write a file so that a reader sees the old one or the new one, never a part.

    The content goes to a temporary file next to it, which is then renamed: the last of two writers wins.
    Missing folders are made.

    Returns:
        Whether it was written; where it could not be, a :class:`NotWrittenWarning` says why.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a full disk shows here, not after the rename
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)  # gone after the rename; left over after an error or Ctrl-C
    except OSError as error:
        message = _("{path} was not written: {reason}", path=target, reason=error)
        warnings.warn(message, NotWrittenWarning, stacklevel=2)
        return False
    return True


def content(
    answer: Plan | Estimate,
    kind: str,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    title: str = "",
) -> str | bytes:
    """An answer in the form of files that end in ``kind``: see :func:`save`."""
    if kind == ".html":
        from vram_guard.report.html import html_report

        return html_report(answer, timeline=timeline, budget=budget, title=title)
    if kind == ".json":
        from vram_guard.report.as_json import as_json

        return as_json(answer, budget=budget) + "\n"
    if kind == ".svg":
        from vram_guard.report.picture import picture

        return picture(answer, timeline=timeline, budget=budget)
    if kind != ".pickle":
        raise InvalidInputError(
            _("a report is written as .html, .svg, .json or .pickle, not as {kind}", kind=repr(kind)[:20])
        )
    from vram_guard.report.snapshot import pickled

    return pickled(answer, timeline)


def save(
    answer: Plan | Estimate,
    path: str | os.PathLike[str],
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    title: str = "",
) -> bool:
    """Write an answer to a file, whole or not at all, in the form that its name ends in.

    ``.html`` is the page, ``.svg`` the picture, ``.json`` what programs read, and ``.pickle`` a snapshot that
    https://pytorch.org/memory_viz opens.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        path: of the file; missing folders are made.
        timeline: what an estimate was read from: pictures and snapshots need it.
        budget: what an estimate is compared with.
        title: of the page.

    Returns:
        Whether it was written; where it could not be, a :class:`NotWrittenWarning` says why.

    Raises:
        InvalidInputError: the name ends otherwise, or there is no timeline.
    """
    made = content(answer, Path(path).suffix.lower(), timeline=timeline, budget=budget, title=title)
    return write_atomically(path, made)


@contextmanager
def must_be_written() -> Iterator[None]:
    """A file that was asked for by name and cannot be written is an error, not a warning.

    Raises:
        InvalidInputError: :func:`write_atomically` warned.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotWrittenWarning)
        try:
            yield
        except NotWrittenWarning as error:
            raise InvalidInputError(str(error)) from None
