"""Answers as files, each form imported where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.report.files import write_atomically

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate, Timeline


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
        Whether it was written; where it could not be, a warning says why.

    Raises:
        InvalidInputError: the name ends otherwise, or there is no timeline.
    """
    made = content(answer, Path(path).suffix.lower(), timeline=timeline, budget=budget, title=title)
    return write_atomically(path, made)
