"""One HTML file that says it all, to be sent to a colleague: verdict, numbers, charts, the plan and its reasons.

It requests nothing: style, script and data stand in the file, and a content security policy forbids the browser
every request. It follows the reader's light or dark theme, and without a script only the values under the pointer are
missing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib.resources import files

from vram_guard.allocator import AllocatorSettings
from vram_guard.budget import Budget
from vram_guard.cache import cache_folder, forget_oldest
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _, language
from vram_guard.limits import FILES_KEPT, LISTED_ON_PAGE
from vram_guard.plan.model import Plan
from vram_guard.plan.spread import Spread
from vram_guard.report._charts import Chart, lines_drawn, timeline_charts
from vram_guard.report._content import Content, alternatives, plan_facts
from vram_guard.report._markup import escape
from vram_guard.report._spread import count_rows, spread_rows
from vram_guard.report._svg import COLUMNS, script_data, svg
from vram_guard.report.categories import category_name
from vram_guard.report.files import NotWrittenWarning, write_atomically
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import format_bytes

#: No request of any kind may leave the page; its own style and script are part of it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def html_report(
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> str:
    """The page as text.

    Args:
        answer: a plan, or an estimate.
        timeline: what an estimate was read from, for its charts; a plan brings its own.
        budget: what an estimate is compared with; a plan brings its own.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: what was predicted ("GPT-2 on our data").
    """
    content = Content.of(answer, budget)
    plan = content.plan
    if plan is not None:
        timeline = plan.timeline
    name = title or _("GPU memory of a training step")
    sections = [
        _head(name, content),
        "" if plan is None else _plan(plan, content.reasons()),
        _numbers(content),
        _charts(content, timeline, settings),
        _notes(content),
        _foot(),
    ]
    assets = files("vram_guard.report") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="{language().replace("_", "-")}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def save_html(
    answer: Plan | Estimate,
    path: str | os.PathLike[str],
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> bool:
    """Write :func:`html_report` to a file, whole or not at all.

    Returns:
        Whether it was written; where it could not be, a warning says why.
    """
    page = html_report(answer, timeline=timeline, budget=budget, settings=settings, title=title)
    return write_atomically(path, page)


def page_to_keep(answer: Plan | Estimate, *, budget: Budget | None = None, title: str = "") -> str:
    """The page for :func:`where_to_read_on`."""
    return html_report(answer, budget=budget, title=title)


def where_to_read_on(page: str, how: str) -> str:
    """The line that ends a short report.

    Args:
        page: of :func:`page_to_keep`; it is left in the folder of what is remembered, where the newest
            :data:`MOST_PAGES` stay.
        how: the option or setting that prints all of it.
    """
    folder = cache_folder()
    if folder is None:
        return _("Full report: with {how}", how=how)
    path = folder / "reports" / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}.html"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotWrittenWarning)
        written = write_atomically(path, page)
    forget_oldest(path.parent, FILES_KEPT, ("*.html",))
    return (
        _("Full report ({how} prints it here): {page}", page=path, how=how)
        if written
        else _("Full report: with {how}", how=how)
    )


# --- sections ------------------------------------------------------------------------------------------------------


def _head(name: str, content: Content) -> str:
    parts, budget = [f"<h1>{escape(name)}</h1>"], content.budget
    if budget is not None:
        kind, head, figures = content.verdict(budget)
        said = _("{verdict}: {figures}.", verdict=head, figures=figures)
        if line := content.headline(budget):
            parts.append(f'<p class="verdict {kind}">{escape(line)}</p>')
        parts.append(f'<p class="verdict {kind}">{escape(said)}</p>')
        parts += [f"<p>{escape(line)}</p>" for line in content.cautions()]
        parts += [_bar(bar, peak, budget) for bar, peak in content.bars()]
        parts.append(f'<p class="soft">{escape(_("Budget: {budget}", budget=budget.explain()))}</p>')
    return _tag("header", parts)


def _bar(name: str, peak: int, budget: Budget) -> str:
    """The reserved peak against the usable bytes; a mark where they end if the peak is beyond."""
    usable = budget.usable
    whole = max(peak, usable)
    over = " over" if peak > usable else ""
    mark = f'<span class="mark" style="left:{100 * usable / whole:.1f}%"></span>' if over else ""
    value = f"{format_bytes(peak)} ({peak / usable:.0%})"
    return (
        f'<div class="bar"><span class="name">{escape(name)}</span><span class="track" aria-hidden="true">'
        f'<span class="used{over}" style="width:{100 * peak / whole:.1f}%"></span>{mark}</span>'
        f'<span class="value">{escape(value)}</span></div>'
    )


def _numbers(content: Content) -> str:
    rows = []
    for category, (name, *cells) in content.peak_rows():
        swatch = f'<span class="swatch" style="background:var(--{category})"></span>' if category else ""
        rows.append(_row(swatch + escape(name), cells, kind="" if category else "sum"))
    parts = [f"<h2>{escape(_('Memory use'))}</h2>", _table(content.peak_heads(), rows)]
    parts += [f"<h3>{escape(_('Peak'))}</h3>", _facts(content.peak_facts())]
    phases = [_row(escape(name), cells) for name, *cells in content.phase_rows()]
    if phases:
        parts.append(f"<h3>{escape(_('Peak of each phase'))}</h3>")
        parts.append(_table(content.phase_heads(), phases))
    parts.append(_list(_("Memory that grows"), content.leaks()))
    modules = [_row(f"<code>{escape(name)}</code>", cells) for name, *cells in content.modules(LISTED_ON_PAGE)]
    if modules:
        parts.append(f"<h3>{escape(_('Modules that hold most at the peak'))}</h3>")
        parts.append(_table([_("module"), _("bytes"), _("share")], modules))
    return _tag("section", parts)


def _charts(content: Content, timeline: Timeline | None, settings: AllocatorSettings | None) -> str:
    if timeline is None:
        return ""
    try:
        charts = timeline_charts(content.answer, timeline, content.budget, settings, COLUMNS)
    except UnsupportedStepError:  # each size is a trace of its own, and the plan came from another process
        return ""
    return _tag("section", [f"<h2>{escape(_('Over the step'))}</h2>", *map(_figure, charts)])


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<span><span class="swatch" style="background:var(--{name})"></span>{escape(category_name(name))}</span>'
        for name in chart.layers
    )
    legend += "".join(f"<span>{escape(line)}</span>" for line in lines_drawn([chart]))
    # A "</script>" in a name would end the block; "<" has an escape in JSON.
    data = json.dumps(script_data(chart), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure data-chart><figcaption><h3>{escape(chart.caption)}</h3>{escape(chart.remark)}</figcaption>"
        f'<div class="scroll">{svg(chart)}</div><div class="legend">{legend}</div>'
        f'<p class="readout" aria-live="polite"></p><script type="application/json">{data}</script></figure>'
    )


def _plan(plan: Plan, reasons: list[str]) -> str:
    rows = [_row(escape(name), cells, numbers=0) for name, *cells in plan.changes()]
    parts = [
        f"<h2>{escape(_('Plan'))}</h2>",
        _table(["", _("as written"), _("planned")], rows, numbers=0) if rows else "",
        _facts(plan_facts(plan)),
        *_spread(plan.spread),
        _list(_("Why"), reasons),
        _list(_("Alternatives considered, closest first"), alternatives(plan, LISTED_ON_PAGE)),
    ]
    return _tag("section", parts)


def _spread(spread: Spread | None) -> Iterator[str]:
    """How the training lies on several GPUs."""
    if spread is None:
        return
    yield f"<h3>{escape(_('Over several GPUs'))}</h3>"
    yield _facts(spread.facts())
    for title, rows in (
        (_("Ways to spread it, the simplest first"), spread_rows(spread)),
        (_("The same training on other numbers of GPUs"), count_rows(spread)),
    ):
        if rows:
            yield f"<h3>{escape(title)}</h3>"
            yield _table(rows[0], [_row(escape(name), cells, numbers=2) for name, *cells in rows[1:]], numbers=2)


def _notes(content: Content) -> str:
    lines = content.notes(LISTED_ON_PAGE)
    return _tag("section", [f"<h2>{escape(_('Notes'))}</h2>", _list("", lines)]) if lines else ""


def _foot() -> str:
    from vram_guard import __version__

    said = _(
        "Predicted by vram_guard {version}, without a GPU. This page makes no network requests.", version=__version__
    )
    return f"<footer>{escape(said)}</footer>"


# --- pieces --------------------------------------------------------------------------------------------------------


def _tag(name: str, parts: Iterable[str]) -> str:
    return f"<{name}>\n" + "\n".join(filter(None, parts)) + f"\n</{name}>"


def _row(name: str, cells: Sequence[str], *, kind: str = "", numbers: int | None = None) -> str:
    """A row; ``name`` is HTML already. The first ``numbers`` of the cells hold figures; None: all do."""
    kinds = _kinds(len(cells), numbers)
    rest = "".join(f"<td{one}>{escape(cell)}</td>" for one, cell in zip(kinds, cells, strict=True))
    return f'<tr class="{kind}"><td>{name}</td>{rest}</tr>'


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """Names and their values."""
    rows = "".join(_row(escape(name), [value], numbers=0) for name, value in facts)
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else ""


def _kinds(cells: int, numbers: int | None) -> list[str]:
    figures = cells if numbers is None else numbers
    return [' class="n"'] * figures + [""] * (cells - figures)


def _table(heads: Sequence[str], rows: Iterable[str], *, numbers: int | None = None) -> str:
    kinds = ["", *_kinds(len(heads) - 1, numbers)]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, heads, strict=True))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f"{head}<ul>{items}</ul>" if items else ""
