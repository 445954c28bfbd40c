"""Answers as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.files import write_atomically
from vram_guard.language import _
from vram_guard.report.as_json import as_json
from vram_guard.report.html import html_report
from vram_guard.report.picture import picture
from vram_guard.report.snapshot import pickled

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.plan import Plan
    from vram_guard.timeline import Estimate, Timeline


def save(
    answer: Plan | Estimate,
    path: str | os.PathLike[str],
    kind: str = "",
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    title: str = "",
) -> None:
    """Write an answer to a file, whole or not at all, in the form that its name ends in.

    ``.html`` is the page, ``.svg`` the picture, ``.json`` what programs read, and ``.pickle`` a snapshot that
    https://pytorch.org/memory_viz opens.

    Args:
        answer: a plan, which brings its timelines and its budget, or an estimate.
        path: of the file; missing folders are made.
        kind: the form, where the name does not end in it: ".html", ".svg", ".json" or ".pickle".
        timeline: what an estimate was read from: pictures and snapshots need it.
        budget: what an estimate is compared with.
        title: of the page.

    Raises:
        InvalidInputError: the form is none of these, there is no timeline, or the file cannot be written.
    """
    made: str | bytes
    kind = kind or Path(path).suffix.lower()
    if kind == ".html":
        made = html_report(answer, timeline=timeline, budget=budget, title=title)
    elif kind == ".json":
        made = as_json(answer, budget=budget) + "\n"
    elif kind == ".svg":
        made = picture(answer, timeline=timeline, budget=budget)
    elif kind == ".pickle":
        made = pickled(answer, timeline)
    else:
        raise InvalidInputError(
            _("a report is written as .html, .svg, .json or .pickle, not as {kind}", kind=repr(kind)[:20])
        )
    write_atomically(path, made)
