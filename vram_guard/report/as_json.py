"""Estimates and plans as JSON: a versioned schema, every amount an int of bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vram_guard.codec import to_plain
from vram_guard.plan.model import CompiledStep, Plan

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.parallel.spec import Parallel
    from vram_guard.plan.spread import LayoutPlan, Spread
    from vram_guard.timeline import Estimate, Note, OutOfMemoryPoint, Phase

#: Fields are only added under this name; a field that changes its meaning gets a new one.
SCHEMA = "vram_guard.report/1"

_LAYOUT = ("gpus", "node", "kind", "tensor", "replicate", "reshard", "offload", "param_dtype", "reduce_dtype")


def as_dict(answer: Plan | Estimate, *, budget: Budget | None = None) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers.

    Args:
        answer: a plan, or an estimate.
        budget: what an estimate is compared with; a plan brings its own.
    """
    if isinstance(answer, Plan):
        return {"schema": SCHEMA, "kind": "plan", **_plan(answer), "budget": _budget(answer.budget)}
    if budget is not None:
        budget = budget.for_tier(answer.tier, answer.network)
    held_against = {} if budget is None else {"budget": _budget(budget), "fits": answer.fits(budget)}
    return {"schema": SCHEMA, "kind": "estimate", "estimate": _estimate(answer), **held_against}


def as_json(answer: Plan | Estimate, *, budget: Budget | None = None) -> str:
    """The answer as JSON text; pure ASCII, so that no terminal or file encoding can spoil it."""
    return json.dumps(as_dict(answer, budget=budget), indent=2, allow_nan=False)


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "changed": plan.changed,
        "precision": {"before": plan.precision_before, "after": plan.precision},
        "batch_size": {"before": plan.batch_size_before, "after": plan.batch_size},
        "micro_batch_size": {"before": plan.batch_size_before, "after": plan.micro_batch_size},
        "accumulate": {"before": plan.accumulate_before, "after": plan.accumulate},
        "effective_batch_size": {
            "before": plan.effective_batch_size_before,
            "after": plan.effective_batch_size,
        },
        "learning_rate_factor": plan.learning_rate_factor,
        "checkpointed_modules": list(plan.checkpointed_modules),
        "offload": list(plan.offload),
        "recipe": to_plain(plan.recipe),
        "slowdown": plan.slowdown,
        "correction": plan.correction,
        "estimate": _estimate(plan.estimate),
        "before": _estimate(plan.before),
        "reasons": list(plan.reasons),
        "rejected": [
            {name: getattr(option, name) for name in ("option", "peak_reserved", "missing", "why")}
            for option in plan.rejected
        ],
        **({} if plan.spread is None else {"spread": _spread(plan.spread)}),
        **({} if plan.evaluation is None else {"evaluation": asdict(plan.evaluation)}),
        **({} if plan.compiled is None else {"compiled": _compiled(plan.compiled)}),
    }


def _compiled(compiled: CompiledStep) -> dict[str, Any]:
    return {
        "followed": not compiled.why,
        "why": compiled.why,
        "graphs": compiled.graphs,
        "breaks": list(compiled.breaks),
        "eager": _estimate(compiled.eager),
    }


def _spread(spread: Spread) -> dict[str, Any]:
    communication = spread.communication
    return {
        "gpus": spread.gpus,
        "nodes": spread.nodes,
        "fewest": spread.found,
        "layout": _layout(spread.layout),
        "link": {"inside": spread.topology.inside.name, "between": spread.topology.between.name},
        "samples_per_step": spread.samples,
        "seconds_per_step": spread.seconds,
        "samples_per_second": spread.samples_per_second,
        "communication": {
            "seconds": communication.seconds,
            "waiting": communication.exposed,
            "calls": communication.calls,
        },
        "outside_allocator": spread.outside and asdict(spread.outside),
        "host_bytes_per_node": spread.host_per_node,
        "assumptions": list(spread.topology.assumptions),
        "ways": [_way(way) for way in spread.ways],
    }


def _way(way: LayoutPlan) -> dict[str, Any]:
    return {
        "gpus": way.gpus,
        "layout": _layout(way.layout),
        "words": way.words,
        "fits": way.fits,
        "peak_reserved": way.peak,
        "seconds_per_step": way.seconds,
        "why": str(way.why),
    }


def _layout(layout: Parallel | None) -> dict[str, Any] | None:
    return None if layout is None else {name: getattr(layout, name) for name in _LAYOUT}


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "batch_size": estimate.batch_size,
        "peak_allocated": estimate.peak_allocated,
        "peak_reserved": estimate.peak_reserved,
        "peak_reserved_lower": estimate.peak_lower or estimate.peak_reserved,
        "peak_reserved_upper": max(estimate.peak_reserved, estimate.peak_upper),
        "upper_reasons": list(estimate.upper_reasons),
        "by_stream": list(estimate.by_stream),
        "host_peak": estimate.host_peak,
        "breakdown": dict(estimate.breakdown),
        "by_module": dict(estimate.by_module),
        "peak": {
            **_phase(estimate.peak_phase),
            "module": estimate.peak_module,
            "source": estimate.peak_source,
            "operator": estimate.peak_operator,
        },
        "tier": estimate.tier,
        "releases": None if estimate.releases is None else estimate.releases.as_dict(),
        "network": estimate.network,
        "cudnn": estimate.cudnn and {**estimate.cudnn._asdict(), "bytes": estimate.cudnn_bytes},
        "notes": [_note(note) for note in estimate.notes],
        "out_of_memory": _out_of_memory(estimate.out_of_memory),
        **({"phases": [phase._asdict() for phase in estimate.phases]} if estimate.phases else {}),
        **({"leaks": [leak._asdict() for leak in estimate.leaks]} if estimate.leaks else {}),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {"phase": phase.name, "step": phase.step, **({"label": phase.label} if phase.label else {})}


def _note(note: Note) -> dict[str, Any]:
    return {"message": note.message, "source": note.source, "operator": note.operator}


def _out_of_memory(point: OutOfMemoryPoint | None) -> dict[str, Any] | None:
    if point is None:
        return None
    sizes = {name: getattr(point, name) for name in ("requested", "allocated", "reserved", "fragmented")}
    return {**sizes, **_phase(point.phase), **{name: getattr(point, name) for name in ("module", "source", "operator")}}


def _budget(budget: Budget) -> dict[str, Any]:
    names = ("usable", "available", "total", "margin", "margin_source", "source")
    return {
        **{name: getattr(budget, name) for name in names},
        "gpu": None if budget.gpu is None else budget.gpu.name,
        "compute_capability": budget.compute_capability and list(budget.compute_capability),
        "notes": list(budget.notes),
    }
