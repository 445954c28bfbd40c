"""The compiled step of a plan: eager timelines are searched, and what was chosen is followed as it will run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vram_guard.language import Message, _
from vram_guard.plan._answer import as_known, batch_reasons, make_plan, shortage, unchanged
from vram_guard.plan._option import Option
from vram_guard.plan.descriptions import Reason, Why
from vram_guard.plan.model import CompiledStep, Plan, Rejected
from vram_guard.plan.search_space import Candidate, Request
from vram_guard.plan.source import Source, TraceRequest
from vram_guard.plan.techniques import ACTIVATION_BUDGETS
from vram_guard.plan.tracing import Traces
from vram_guard.simulate.compiled import EAGER, Compiler, NotCompiledError, not_followed
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard.timeline import Estimate, Timeline
from vram_guard.units import Amount


def with_compiled(
    made: Plan,
    request: Request,
    source: Source,
    search: Callable[[Request], Plan],
    compiler: Compiler[TraceRequest],
    progress: Callable[[str], None],
    *,
    budgeted: bool = False,
) -> Plan:
    """The plan for the step as ``torch.compile`` compiles it; for the eager one, where that cannot be followed.

    Args:
        made: for the eager step.
        request: what was asked.
        source: of the step, with its job where it has one.
        search: for a plan of the eager step under another request.
        compiler: follows the source's compiled steps: at most three of them, and one for each budget that is tried.
        progress: called with a line of text before each slow part.
        budgeted: whether compiled code may save less for its backward pass (``activation_memory_budget``).
    """
    following = _Compiled(source, request, compiler, progress)
    try:
        return _followed(made, request, following, search, budgeted=budgeted)
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


def _followed(
    made: Plan, request: Request, compiled: _Compiled, search: Callable[[Request], Plan], *, budgeted: bool
) -> Plan:
    before = compiled(request.as_written, request.batch_size) if _as_written(made) or not made.fits_as_written else None
    if before is not None and request.fits(before.estimate) and not made.fits_as_written:
        # The compiled step fits where the eager one does not: nothing has to change.
        found = unchanged(request, before, batch_reasons(before), made.rejected)
        return replace(found, compiled=_beside(made.before, before))
    rejected: tuple[Rejected, ...] = ()
    if budgeted and before is not None and not request.fits(before.estimate):
        option, rejected = _largest_budget(request, compiled)
        if option is not None:
            return _under_budget(made, request, before, option, compiled(option, request.batch_size), rejected)
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
        rejected=(*rejected, *made.rejected),
        correction=request.correction,
        compiled=_beside(eager, chosen),
    )


def _largest_budget(request: Request, compiled: _Compiled) -> tuple[Option | None, tuple[Rejected, ...]]:
    """The largest budget under which the step as written fits, and those that were tried before it.

    Peaks do not fall with the budget: the partitioner counts what is saved, not what is computed again beside it. So
    each is compiled.
    """
    from vram_guard.techniques.activation_budget import present_budget, why_not_budgeted

    rejected: list[Rejected] = []

    def note(option: Option, why: Reason, peak: int | None = None, missing: int = 0) -> None:
        rejected.append(Rejected(option.of(request.batch_size), peak, missing, why))

    missing_in_torch = why_not_budgeted()
    for budget in ACTIVATION_BUDGETS:
        option = request.as_written._replace(recipe=AS_WRITTEN.with_(activation_memory_budget=budget))
        if missing_in_torch:
            note(option, Reason(Why.FAILS, error=missing_in_torch))
            break
        if budget >= present_budget():
            continue
        try:
            found = compiled(option, request.batch_size)
        except NotCompiledError as error:
            note(option, Reason(Why.FAILS, error=str(error)))
            continue
        code, peak = found.timeline.compiled, request.corrected(found.estimate)
        if code is not None and code.redrawn:
            note(option, Reason(Why.DRAWS_AGAIN, operators=", ".join(code.redrawn)))
        elif code is not None and code.reads_changed:
            note(option, Reason(Why.READS_CHANGED))
        elif request.fits(found.estimate):
            return option, tuple(rejected)
        else:
            over = max(0, peak - request.usable(found.estimate))
            note(option, Reason(Why.OVER_BUDGET, peak=Amount(peak), missing=Amount(over)), peak, over)
    return None, tuple(rejected)


def _under_budget(
    made: Plan, request: Request, before: Candidate, option: Option, after: Candidate, rejected: tuple[Rejected, ...]
) -> Plan:
    why = (shortage(request, before.estimate), Reason(Why.LEAST_RECOMPUTED))
    found = make_plan(request, before, after, option, request.batch_size, True, why, rejected)
    return replace(found, compiled=_beside(made.before, after))


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
