"""Answers as a notebook shows them: a few rows of HTML that take colours and fonts from the notebook around them.

Nothing is requested, nothing is run, and all text is escaped. Where a viewer removes the style (pages of repositories),
the tables stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable

from vram_guard.budget import Budget
from vram_guard.language import _
from vram_guard.plan import Plan
from vram_guard.report._content import TIER_NAMES, Content
from vram_guard.report._markup import escape
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import format_bytes

#: No colour of its own for text or page: both are the notebook's, light or dark.
STYLE = (
    ".vram-guard table{border-collapse:collapse;margin:.4em 0}"
    ".vram-guard td,.vram-guard th{text-align:left;padding:.15em 1em .15em 0;background:none}"
    ".vram-guard td.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".vram-guard .track{border:1px solid;height:.7em;max-width:30em}"
    ".vram-guard .used{height:100%;background:#2e8b57}.vram-guard .used.over{background:#c8374a}"
)


def html_of(answer: Plan | Estimate | Timeline | Budget) -> str:
    """The answer as an element of HTML, in the reader's language."""
    if isinstance(answer, Budget):
        parts = [_sentence(_("Budget: {budget}", budget=answer.explain())), *map(_sentence, answer.notes)]
    elif isinstance(answer, Timeline):
        parts = [_table(_timeline_facts(answer))]
    else:
        parts = _report(Content.of(answer, None))
    return f'<div class="vram-guard"><style>{STYLE}</style>{"".join(parts)}</div>'


def _report(content: Content) -> list[str]:
    parts = []
    plan, budget = content.plan, content.budget
    if budget is not None:
        _kind, head, figures = content.verdict(budget)
        said = content.headline(budget) or _("{verdict}: {figures}.", verdict=head, figures=figures)
        over = " over" if content.peak > budget.usable else ""
        share = min(1.0, content.peak / max(1, budget.usable))
        parts += [
            _sentence(said, tag="strong"),
            *map(_sentence, content.cautions()),
            f'<div class="track" aria-hidden="true"><div class="used{over}" style="width:{share:.1%}"></div></div>',
            _sentence(_("Budget: {budget}", budget=budget.explain())),
        ]
    if plan is not None and plan.changed:
        heads = ["", _("as written"), _("planned")]
        parts.append(_table(plan.changes(), heads))
    sizes = [(name, *cells) for _category, (name, *cells) in content.peak_rows()]
    parts += [_table(sizes, content.peak_heads(), numbers=True), _table(content.peak_facts())]
    if plan is not None and plan.changed:
        parts.append("<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in content.reasons()) + "</ul>")
    return parts


def _timeline_facts(timeline: Timeline) -> list[tuple[str, str]]:
    sizes = sorted({phase.step for phase in timeline.phases})
    return [
        (_("traced batch sizes"), ", ".join(map(str, timeline.traced))),
        (_("precision"), timeline.precision),
        (_("optimizer"), timeline.optimizer),
        (_("training steps"), str(len(sizes))),
        (_("allocations"), f"{len(timeline.blocks):,}"),
        (_("answer"), _(TIER_NAMES[timeline.tier])),
        *(
            (_("peak reserved, batch {size}", size=size), format_bytes(timeline.at(size).peak_reserved))
            for size in timeline.traced
            if timeline.retrace is None
        ),
        (_("releases"), str(timeline.releases)),
    ]


def _sentence(text: str, *, tag: str = "span") -> str:
    return f"<p><{tag}>{escape(text)}</{tag}></p>"


def _table(rows: Iterable[Iterable[str]], heads: Iterable[str] = (), *, numbers: bool = False) -> str:
    kind = ' class="n"' if numbers else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows
        if any(cells)
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"
