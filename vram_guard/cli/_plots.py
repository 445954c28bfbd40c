"""``--html``, ``--plot``, ``--trace``, ``--snapshot``: the pictures that several commands offer, in one place."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import GPU, Budget
from vram_guard.cli.printing import say
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.timeline import Estimate, Timeline


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """The options; what they ask for is written by :func:`write_pictures`."""
    group = parser.add_argument_group(_("plots"))
    group.add_argument("--html", metavar="FILE", help=_("write the report as a self-contained HTML page"))
    group.add_argument("--plot", metavar="FILE", help=_("write the memory over the step as .png, .svg or .pdf"))
    group.add_argument("--plot-batch", metavar="FILE", help=_("write the peak over the batch size, per GPU"))
    group.add_argument("--trace", metavar="FILE", help=_("write a trace for ui.perfetto.dev and chrome://tracing"))
    group.add_argument("--snapshot", metavar="FILE", help=_("write a snapshot for pytorch.org/memory_viz"))


def check_pictures(options: argparse.Namespace, *more: str | None) -> None:
    """Before any work: matplotlib is there if it is needed, and the files' names have endings that can be written.

    Args:
        options: with the values of :func:`add_picture_options`.
        more: names of other pictures.

    Raises:
        InvalidInputError: another ending than .png, .svg or .pdf, or a folder.
        MissingLibraryError: matplotlib is not installed; names the extra that brings it.
    """
    for path in (options.html, options.plot, options.plot_batch, options.trace, options.snapshot, *more):
        if path and Path(path).is_dir():
            raise InvalidInputError(_("{path} is a folder: give the name of a file", path=path))
    asked = [path for path in (options.plot, options.plot_batch, *more) if path]
    if asked:
        from vram_guard.report.plot import new_figure, picture_format

        for path in asked:
            picture_format(path)
        new_figure(1)


def write_pictures(
    options: argparse.Namespace,
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    gpus: Iterable[Budget | GPU | str | int] | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> None:
    """Write what was asked for, and say on standard error where it is.

    Args:
        options: with the values of :func:`add_picture_options`.
        answer: a plan, which brings its timelines and its budget, or an estimate.
        timeline: what an estimate was read from.
        budget: what an estimate is compared with.
        gpus: whose largest batches the page and the batch picture show; None: common cards.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: what was predicted.

    Raises:
        InvalidInputError: a picture of the step is asked for and there is no timeline; a file cannot be written.
    """
    from vram_guard.plan.model import Plan
    from vram_guard.report import (
        batch_figure,
        plan_figure,
        save_figure,
        save_html,
        save_snapshot,
        save_trace,
        timeline_figure,
    )
    from vram_guard.report.batch_curve import COMMON_CARDS
    from vram_guard.report.files import must_be_written

    cards = None if gpus is None else tuple(gpus)
    with must_be_written():
        if options.html:
            save_html(
                answer, options.html, timeline=timeline, budget=budget, gpus=cards, settings=settings, title=title
            )
            _wrote(options.html)
        others = [path for path in (options.plot, options.plot_batch, options.trace, options.snapshot) if path]
        if not others:
            return
        size, at, written = answer.batch_size, answer.batch_size, timeline
        if isinstance(answer, Plan):
            size, at = answer.estimate.batch_size, answer.batch_size_before
            timeline, written, budget = answer.timeline, answer.timeline_before, answer.budget
        if timeline is None:
            raise InvalidInputError(_("there is no step to draw: only a model that can be built has a timeline"))
        if options.plot and isinstance(answer, Plan):
            save_figure(plan_figure(answer, settings=settings), options.plot)
        elif options.plot:
            save_figure(timeline_figure(timeline, size, budget=budget, settings=settings), options.plot)
        if options.plot_batch:
            figure = batch_figure(written or timeline, cards or COMMON_CARDS, at=at, settings=settings)
            save_figure(figure, options.plot_batch)
        if options.trace:
            save_trace(timeline, size, options.trace, budget=budget, settings=settings)
        if options.snapshot:
            save_snapshot(timeline, size, options.snapshot, settings=settings)
    for path in others:
        _wrote(path)


def _wrote(path: str) -> None:
    say(_("wrote {path}", path=path), sys.stderr)
