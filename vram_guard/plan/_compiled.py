"""The compiled step of a plan: eager timelines are searched, and what was chosen is followed as it will run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vram_guard.language import Message, _
from vram_guard.plan._answer import as_known, batch_reasons, shortage, unchanged
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.model import CompiledStep, Plan
from vram_guard.plan.search_space import Candidate, Request
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.tracing import Traces
from vram_guard.simulate.compiled import EAGER, Compiler, NotCompiledError, not_followed
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import Amount


def with_compiled(
    made: Plan,
    request: Request,
    source: Source,
    search: Callable[[Request], Plan],
    compiler: Compiler[TraceRequest],
    progress: Callable[[str], None],
) -> Plan:
    """The plan for the step as ``torch.compile`` compiles it; for the eager one, where that cannot be followed.

    Args:
        made: for the eager step.
        request: what was asked.
        source: of the step, with its job where it has one.
        search: for a plan of the eager step under another request.
        compiler: follows the source's compiled steps: at most three of them.
        progress: called with a line of text before each slow part.
    """
    following = _Compiled(source, request, compiler, progress)
    try:
        return _followed(made, request, following, search)
    except NotCompiledError as error:
        why = str(error)
    finally:
        following.traces.forget()
    return replace(made, compiled=CompiledStep(made.estimate, why=why), **_said(made, why))


class _Compiled:
    """Compiled timelines of options, each followed once."""

    def __init__(
        self, source: Source, request: Request, compiler: Compiler[TraceRequest], progress: Callable[[str], None]
    ) -> None:
        def trace(asked: TraceRequest) -> Timeline:
            progress(_("following the compiled step, for at most {seconds} s", seconds=f"{compiler.seconds:g}"))
            return compiler(replace(asked, compiled=True))

        own = replace(source, trace=trace, marks=False, one_size=True)
        self.traces = Traces(own, request.batch_size, lambda _line: None, request.budget)
        self._request = request

    def __call__(self, option: Option, size: int) -> Candidate:
        timeline = self.traces.exact(option, size)
        return Candidate(timeline, timeline.at(size, settings=self._request.settings_under(option.recipe)))


def _followed(made: Plan, request: Request, compiled: _Compiled, search: Callable[[Request], Plan]) -> Plan:
    before = compiled(request.as_written, request.batch_size) if _as_written(made) or not made.fits_as_written else None
    if before is not None and request.fits(before.estimate) and not made.fits_as_written:
        # The compiled step fits where the eager one does not: nothing has to change.
        found = unchanged(request, before, batch_reasons(before), made.rejected)
        return replace(found, compiled=_beside(made.before, before))
    chosen = before if before is not None and _as_written(made) else compiled(_option(made), made.micro_batch_size)
    if made.fits and not request.fits(chosen.estimate):
        # Compiled code may hold more than eager code: search once more for steps that take so much more.
        factor = chosen.estimate.peak_reserved / made.estimate.peak_reserved
        again = search(replace(request, correction=request.correction * max(1.0, factor)))
        if again.fits:
            chosen, made = compiled(_option(again), again.micro_batch_size), again
    eager, fits = made.estimate, made.fits and request.fits(chosen.estimate)
    reasons = made.reason_values
    if before is not None and not request.fits(before.estimate):  # what is short is short of the compiled step's bytes
        short = shortage(request, before.estimate)
        made = replace(made, rejected=as_known(request, before.estimate, made.rejected))
        reasons = tuple(short if reason.kind is Why.SHORTAGE else reason for reason in reasons)
    if made.fits and not fits:
        over = request.corrected(chosen.estimate) - request.usable(chosen.estimate)
        reasons = (Reason(Why.COMPILED_TOO_LARGE, missing=Amount(max(0, over))), *reasons)
    return replace(
        made,
        estimate=chosen.estimate,
        timeline=chosen.timeline,
        before=made.before if before is None else before.estimate,
        timeline_before=made.timeline_before if before is None else before.timeline,
        budget=request.budget.for_tier(chosen.estimate.tier, chosen.estimate.network),
        fits=fits,
        reason_values=reasons,
        correction=request.correction,
        compiled=_beside(eager, chosen),
    )


def _option(made: Plan) -> Option:
    return Option(made.precision, made.splits, made.recipe)


def _as_written(made: Plan) -> bool:
    return not made.changed


def _beside(eager: Estimate, compiled: Candidate) -> CompiledStep:
    code = compiled.timeline.compiled
    return CompiledStep(eager) if code is None else CompiledStep(eager, code.graphs, code.breaks)


def _said(made: Plan, why: str) -> dict[str, Any]:
    """The estimates, which say why compiled code was counted as eager."""
    return {name: _with_reason(getattr(made, name), not_followed(why)) for name in ("estimate", "before")}


def _with_reason(estimate: Estimate, said: Message) -> Estimate:
    notes = tuple(note._replace(said=said) if note.said == EAGER else note for note in estimate.notes)
    return replace(estimate, notes=notes)
