"""One HTML file that says it all, to be sent to a colleague: verdict, numbers, charts, the plan and its reasons.

It requests nothing: its style stands in the file, and a content security policy forbids the browser
every request. It has no script, and follows the reader's light or dark theme.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files

from vram_guard.budget import Budget
from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.files import write_atomically
from vram_guard.language import _, language
from vram_guard.limits import FILES_KEPT, LISTED_ON_PAGE
from vram_guard.plan.model import Plan
from vram_guard.report._charts import timeline_charts
from vram_guard.report._content import Content, Section
from vram_guard.report.picture import drawing, escape
from vram_guard.timeline import Estimate, Timeline

#: No request of any kind may leave the page; its own style is part of it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_report(
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    title: str = "",
) -> str:
    """The page as text.

    Args:
        answer: a plan, or an estimate.
        timeline: what an estimate was read from, for its charts; a plan brings its own.
        budget: what an estimate is compared with; a plan brings its own.
        title: what was predicted ("GPT-2 on our data").
    """
    content = Content.of(answer, budget)
    if isinstance(answer, Plan):
        timeline = answer.timeline
    name = title or _("GPU memory of a training step")
    parts = [
        _head(name, content),
        *map(_section, content.planned(LISTED_ON_PAGE)),
        *map(_section, content.memory(LISTED_ON_PAGE)),
        _charts(content, timeline),
        _foot(),
    ]
    style = (files("vram_guard.report") / "assets" / "report.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="{language().replace("_", "-")}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body>\n</html>\n"
    )


def where_to_read_on(page: str, how: str) -> str:
    """The line that ends a short report.

    Args:
        page: of :func:`html_report`; it is left in the folder of what is remembered, where the newest
            :data:`vram_guard.limits.FILES_KEPT` stay.
        how: the option or setting that prints all of it.
    """
    folder = cache_folder()
    if folder is None:
        return _("Full report: with {how}", how=how)
    path = folder / "reports" / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}.html"
    try:
        write_atomically(path, page)
    except InvalidInputError:
        return _("Full report: with {how}", how=how)
    forget_oldest(path.parent, FILES_KEPT, ("*.html",))
    return _("Full report ({how} prints it here): {page}", page=path, how=how)


def _head(name: str, content: Content) -> str:
    parts, budget = [f"<h1>{escape(name)}</h1>"], content.budget
    if budget is not None:
        kind, head, figures = content.verdict(budget)
        said = _("{verdict}: {figures}.", verdict=head, figures=figures)
        if line := content.headline(budget):
            parts.append(f'<p class="verdict {kind}">{escape(line)}</p>')
        parts.append(f'<p class="verdict {kind}">{escape(said)}</p>')
        parts += [f"<p>{escape(line)}</p>" for line in content.cautions()]
        parts.append(f'<p class="soft">{escape(_("Budget: {budget}", budget=budget.explain()))}</p>')
    return "\n".join(["<header>", *parts, "</header>"])


def _charts(content: Content, timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    try:
        charts = timeline_charts(content.answer, timeline, content.budget)
    except UnsupportedStepError:  # each size is a trace of its own, and the plan came from another process
        return ""
    return f'<h2>{escape(_("Over the step"))}</h2>\n<div class="scroll">{drawing(charts)}</div>'


def _foot() -> str:
    from vram_guard import __version__

    said = _(
        "Predicted by vram_guard {version}, without a GPU. This page makes no network requests.", version=__version__
    )
    return f"<footer>{escape(said)}</footer>"


def _section(section: Section) -> str:
    """The title and the rows: a list, or a table; nothing where there are none."""
    if not section.rows:
        return ""
    title = f"<h2>{escape(section.title)}</h2>\n"
    if len(section.rows[0]) == 1:
        return f"{title}<ul>{''.join(f'<li>{escape(line)}</li>' for (line,) in section.rows)}</ul>"
    head = f"<thead>{_row(section.heads, section.figures, 'th')}</thead>" if section.heads else ""
    rows = "".join(_row(row, section.figures, "td") for row in section.rows)
    return f'{title}<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _row(cells: Sequence[str], figures: int, tag: str) -> str:
    kinds = ["", *[' class="n"'] * figures, *[""] * len(cells)]
    written = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=False))
    return f"<tr>{''.join(written)}</tr>"
