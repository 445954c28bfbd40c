"""One HTML file that says it all, to be sent to a colleague: verdict, numbers, charts, the plan and its reasons.

It asks nobody for anything: style, script and data stand in the file, and a content security policy forbids the browser
every request. It follows the reader's light or dark theme, and without a script only the values under the pointer are
missing.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from vram_guard.language import _, language, marked
from vram_guard.plan.model import Plan
from vram_guard.report.as_json import fits
from vram_guard.report.batch_curve import COMMON_CARDS, batch_curve
from vram_guard.report.categories import PHASES, category_name
from vram_guard.report.charts import batch_chart, timeline_charts
from vram_guard.report.files import write_atomically
from vram_guard.report.svg import COLUMNS, script_data, svg
from vram_guard.timeline import CATEGORIES
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from vram_guard.allocator import AllocatorSettings
    from vram_guard.budget import GPU, Budget
    from vram_guard.report.batch_curve import BatchCurve
    from vram_guard.report.charts import Chart
    from vram_guard.timeline import Estimate, Timeline

#: No request of any kind may leave the page; its own style and script are part of it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

MOST_MODULES, MOST_REJECTED, MOST_NOTES = 12, 20, 40


def html_report(
    answer: Plan | Estimate,
    *,
    timeline: Timeline | None = None,
    budget: Budget | None = None,
    gpus: Iterable[Budget | GPU | str | int] | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> str:
    """The page as text.

    Args:
        answer: a plan, or an estimate.
        timeline: what an estimate was read from, for its charts; a plan brings its own.
        budget: what an estimate is held against; a plan brings its own.
        gpus: whose largest batches are shown, beside the budget; None: common cards, and none at all where each batch
            size would have to be traced anew.
        settings: the allocator's settings; None: PyTorch's defaults.
        title: what was predicted ("GPT-2 on our data").
    """
    plan = answer if isinstance(answer, Plan) else None
    if plan is not None:
        timeline, budget = plan.timeline, plan.budget
    estimate = plan.estimate if plan is not None else answer
    assert not isinstance(estimate, Plan)
    if budget is not None:
        budget = budget.for_tier(estimate.tier)
    name = title or _("What a training step takes on the GPU")
    sections = [
        _head(name, answer, budget),
        _numbers(estimate, plan),
        _charts(answer, timeline, budget, settings),
        _batch_sizes(estimate, plan, timeline, budget, gpus, settings),
        "" if plan is None else _plan(plan),
        _notes(estimate),
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
    gpus: Iterable[Budget | GPU | str | int] | None = None,
    settings: AllocatorSettings | None = None,
    title: str = "",
) -> bool:
    """Write :func:`html_report` to a file, whole or not at all.

    Returns:
        Whether it was written; where it could not be, a warning says why.
    """
    page = html_report(answer, timeline=timeline, budget=budget, gpus=gpus, settings=settings, title=title)
    return write_atomically(path, page)


# --- sections ------------------------------------------------------------------------------------------------------


def _head(name: str, answer: Plan | Estimate, budget: Budget | None) -> str:
    parts = [f"<h1>{escape(name)}</h1>"]
    if budget is not None:
        fitting = answer.fits if isinstance(answer, Plan) else fits(answer, budget)
        peak = answer.peak if isinstance(answer, Plan) else answer.peak_reserved
        parts.append(_verdict(peak, budget, fitting))
        if isinstance(answer, Plan) and answer.changed:
            parts.append(_bar(_("as written"), answer.before.peak_reserved, budget))
            parts.append(_bar(_("planned"), peak, budget))
        else:
            parts.append(_bar(_("needed"), peak, budget))
        parts.append(f'<p class="soft">{escape(_("Budget: {words}", words=budget.explain()))}</p>')
    return _tag("header", parts)


def _verdict(peak: int, budget: Budget, fitting: bool) -> str:
    usable = budget.usable
    values = {"peak": format_bytes(peak), "usable": format_bytes(usable), "spare": format_bytes(abs(usable - peak))}
    if fitting:
        kind, said = "fits", _("Fits: {peak} of {usable} usable, {spare} to spare.", **values)
    elif peak > usable:
        kind, said = "over", _("Does not fit: {peak} needed, {usable} usable, {spare} too much.", **values)
    else:
        kind, said = "unknown", _("Not known to fit: at least {peak} of {usable} usable.", **values)
    return f'<p class="verdict {kind}">{escape(said)}</p>'


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


def _numbers(estimate: Estimate, plan: Plan | None) -> str:
    before = plan.before if plan is not None and plan.changed else None
    heads = [
        _("at the peak"),
        *([_("as written")] if before else []),
        _("planned") if before else _("bytes"),
        _("share"),
    ]
    rows = []
    for category in CATEGORIES:
        value, old = estimate.breakdown.get(category, 0), before.breakdown.get(category, 0) if before else 0
        if value or old:
            swatch = f'<span class="swatch" style="background:var(--{category})"></span>'
            share = f"{value / estimate.peak_allocated:.1%}" if estimate.peak_allocated else ""
            rows.append(_row(swatch + escape(category_name(category)), old if before else None, value, share))
    totals = (
        (_("peak allocated"), estimate.peak_allocated, before.peak_allocated if before else None),
        (_("peak reserved"), estimate.peak_reserved, before.peak_reserved if before else None),
    )
    rows += [_row(escape(name), old, value, "", "sum") for name, value, old in totals]
    parts = [f"<h2>{escape(_('What it takes'))}</h2>", _table(heads, rows), _where(estimate)]
    modules = [(name, size) for name, size in estimate.by_module.items() if size][:MOST_MODULES]
    if modules:
        lines = [
            f"<tr><td><code>{escape(name or _('(outside any module)'))}</code></td>"
            f'<td class="n">{format_bytes(size)}</td><td class="n">{size / estimate.peak_allocated:.1%}</td></tr>'
            for name, size in modules
        ]
        parts.append(f"<h3>{escape(_('Modules that hold most at the peak'))}</h3>")
        parts.append(_table([_("module"), _("bytes"), _("share")], lines))
    return _tag("section", parts)


def _where(estimate: Estimate) -> str:
    phase = estimate.peak_phase
    step = _("step {count}", count=phase.step) if phase.step else ""
    places = (_(PHASES[phase.name]), step, estimate.peak_module, estimate.peak_source, estimate.peak_operator)
    place = ", ".join(f"<code>{escape(part)}</code>" for part in places if part)
    tier = _(_TIERS[estimate.tier])
    return f"<p>{escape(_('The peak is in'))} {place}.</p><p class='soft'>{escape(tier)}</p>"


_TIERS = {
    "symbolic": marked("The answer is symbolic: every operator's memory is known."),
    "partly symbolic": marked("The answer is partly symbolic: some sizes are bounds, see the notes."),
    "formula": marked("The answer is a lower bound: the step could not be followed to its end."),
}


def _charts(
    answer: Plan | Estimate, timeline: Timeline | None, budget: Budget | None, settings: AllocatorSettings | None
) -> str:
    if timeline is None:
        return ""
    charts = timeline_charts(answer, timeline, budget, settings, COLUMNS)
    return _tag("section", [f"<h2>{escape(_('Over the step'))}</h2>", *map(_figure, charts)])


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<span><span class="swatch" style="background:var(--{name})"></span>{escape(category_name(name))}</span>'
        for name in chart.layers
    )
    lines = [_("line: reserved"), *([_("dashed: budget")] if chart.limits else [])]
    legend += "".join(f"<span>{escape(line)}</span>" for line in lines)
    # A "</script>" in a name would end the block; "<" has an escape in JSON.
    data = json.dumps(script_data(chart), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure data-chart><figcaption><h3>{escape(chart.caption)}</h3>{escape(chart.remark)}</figcaption>"
        f'<div class="scroll">{svg(chart)}</div><div class="legend">{legend}</div>'
        f'<p class="readout" aria-live="polite"></p><script type="application/json">{data}</script></figure>'
    )


def _batch_sizes(
    estimate: Estimate,
    plan: Plan | None,
    timeline: Timeline | None,
    budget: Budget | None,
    gpus: Iterable[Budget | GPU | str | int] | None,
    settings: AllocatorSettings | None,
) -> str:
    if plan is not None and plan.timeline_before is not None:
        timeline, estimate = plan.timeline_before, plan.before
    if timeline is None or (gpus is None and timeline.retrace is not None):
        return ""
    cards = [*(COMMON_CARDS if gpus is None else gpus)]
    if budget is not None:
        # The budget itself unless it is one of the cards.
        names = {card if isinstance(card, str) else getattr(card, "name", "") for card in cards}
        if budget.gpu is None or not budget.context or budget.gpu.name not in names:
            cards.append(budget)
    if not cards:
        return ""
    curve = batch_curve(timeline, cards, at=estimate.batch_size, settings=settings)
    how = _(
        "As written, {precision}: the largest batch of each GPU, its margin kept free.", precision=timeline.precision
    )
    parts = [f"<h2>{escape(_('Batch size'))}</h2>", f"<p>{escape(how)}</p>"]
    chart = svg(batch_chart(curve, timeline.precision, at=estimate.batch_size))
    parts.append(f'<figure><div class="scroll">{chart}</div></figure>')
    parts.append(_limits(curve))
    return _tag("section", parts)


def _limits(curve: BatchCurve) -> str:
    heads = [_("GPU or budget"), _("usable"), _("largest batch"), _("peak reserved there")]
    rows = []
    for limit in curve.limits:
        largest = f"{limit.largest:,}{'+' if limit.open_ended else ''}" if limit.largest else _("none")
        peak = "" if limit.peak is None else format_bytes(limit.peak)
        cells = (format_bytes(limit.usable), largest, peak)
        numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr><td>{escape(limit.name)}</td>{numbers}</tr>")
    return _table(heads, rows)


def _plan(plan: Plan) -> str:
    parts = [f"<h2>{escape(_('Plan'))}</h2>"]
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(before)}</td><td>{escape(after)}</td></tr>"
        for name, before, after in plan.changes()
    ]
    if rows:
        parts.append(_table(["", _("as written"), _("planned")], rows, numbers=False))
    else:
        parts.append(f"<p>{escape(_('Nothing changes.'))}</p>")
    if plan.slowdown is not None and plan.changed:
        parts.append(f"<p>{escape(_('Modelled step time: x {factor}', factor=f'{plan.slowdown:.2f}'))}</p>")
    if plan.estimate.host_peak:
        said = _("Host memory: {amount}", amount=format_bytes(plan.estimate.host_peak))
        parts.append(f"<p>{escape(said)}</p>")
    parts.append(_list(_("Why"), plan.reasons))
    closest = sorted(plan.rejected, key=lambda option: (option.missing == 0, option.missing))
    lines = [f"{option.option}: {option.why}" for option in closest[:MOST_REJECTED]]
    if len(closest) > MOST_REJECTED:
        lines.append(_("and {count} more", count=len(closest) - MOST_REJECTED))
    parts.append(_list(_("Not taken, nearest first"), lines))
    return _tag("section", parts)


def _notes(estimate: Estimate) -> str:
    lines = [f"{note.message}{f' ({note.source})' if note.source else ''}" for note in estimate.notes]
    if len(lines) > MOST_NOTES:
        lines = [*lines[:MOST_NOTES], _("and {count} more", count=len(lines) - MOST_NOTES)]
    return _tag("section", [f"<h2>{escape(_('Notes'))}</h2>", _list("", lines)]) if lines else ""


def _foot() -> str:
    from vram_guard import __version__

    said = _(
        "Predicted by vram_guard {version}, without a GPU. This page sends and loads nothing.", version=__version__
    )
    return f"<footer>{escape(said)}</footer>"


# --- pieces --------------------------------------------------------------------------------------------------------


def _tag(name: str, parts: Iterable[str]) -> str:
    return f"<{name}>\n" + "\n".join(filter(None, parts)) + f"\n</{name}>"


def _row(name: str, old: int | None, value: int, share: str, kind: str = "") -> str:
    cells = [*([] if old is None else [format_bytes(old)]), format_bytes(value), share]
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    return f'<tr class="{kind}"><td>{name}</td>{numbers}</tr>'


def _table(heads: Sequence[str], rows: Iterable[str], *, numbers: bool = True) -> str:
    kinds = ["", *([' class="n"'] * (len(heads) - 1) if numbers else [""] * (len(heads) - 1))]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, heads, strict=True))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f"{head}<ul>{items}</ul>" if items else ""
