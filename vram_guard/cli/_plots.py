"""``--html``, ``--plot``, ``--snapshot``: the pictures that several commands offer, in one place."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import Budget
from vram_guard.cli.printing import say
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.timeline import Estimate, Timeline


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """The options; what they ask for is written by :func:`write_pictures`."""
    group = parser.add_argument_group(_("plots"))
    group.add_argument("--html", metavar="FILE", help=_("write the report as a self-contained HTML page"))
    group.add_argument("--plot", metavar="FILE", help=_("write the memory over the step as .svg"))
    group.add_argument("--snapshot", metavar="FILE", help=_("write a snapshot for pytorch.org/memory_viz"))


def check_pictures(options: argparse.Namespace) -> None:
    """Before any work: the files' names have endings that can be written.

    Args:
        options: with the values of :func:`add_picture_options`.

    Raises:
        InvalidInputError: another ending than .svg, or a folder.
    """
    for path in (options.html, options.plot, options.snapshot):
        if path and Path(path).is_dir():
            raise InvalidInputError(_("{path} is a folder: give the name of a file", path=path))
    if options.plot:
        from vram_guard.report.picture import check_picture_name

        check_picture_name(options.plot)


def write_pictures(
    options: argparse.Namespace,
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> None:
    """Write what was asked for, and say on standard error where it is.

    Args:
        options: with the values of :func:`add_picture_options`.
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: what was predicted.

    Raises:
        InvalidInputError: a picture of the step is asked for and there is no timeline; a file cannot be written.
    """
    from vram_guard.plan.model import Plan
    from vram_guard.report import save_html, save_picture, save_snapshot
    from vram_guard.report.files import must_be_written

    given: dict[str, Any] = {"timeline": timeline, "budget": budget, "settings": settings}
    with must_be_written():
        if options.html:
            save_html(answer, options.html, title=title, **given)
            _wrote(options.html)
        others = [path for path in (options.plot, options.snapshot) if path]
        if not others:
            return
        size = answer.estimate.batch_size if isinstance(answer, Plan) else answer.batch_size
        step = answer.timeline if isinstance(answer, Plan) else timeline
        if step is None:
            raise InvalidInputError(_("there is no step to draw: only a model that can be built has a timeline"))
        if options.plot:
            save_picture(answer, options.plot, **given)
        if options.snapshot:
            save_snapshot(step, size, options.snapshot, settings=settings)
    for path in others:
        _wrote(path)


def _wrote(path: str) -> None:
    say(_("wrote {path}", path=path), sys.stderr)
