"""Tables of a training over several GPUs: the ways to spread it, and other numbers of GPUs."""

from __future__ import annotations

from typing import Any

from vram_guard.language import _
from vram_guard.parallel.spec import Parallel
from vram_guard.plan.spread import LayoutPlan, Spread, format_seconds
from vram_guard.units import format_bytes

_FIELDS = ("gpus", "node", "kind", "tensor", "replicate", "reshard", "offload", "param_dtype", "reduce_dtype")


def spread_rows(spread: Spread) -> list[list[str]]:
    """Titles, then a row for each way; none where there was nothing to choose."""
    if len(spread.ways) < 2:
        return []
    rows: list[list[str]] = []
    said = ""
    for way in spread.ways:
        verdict = _verdict(way, spread)
        repeated = verdict == said and not way.fits
        rows.append([way.words, *_figures(way), _("the same") if repeated else verdict])
        said = verdict
    return [[_("spread"), _("peak"), _("time per step"), _("answer")], *rows]


def count_rows(spread: Spread) -> list[list[str]]:
    """Titles, then a row for each number of GPUs, ascending; none where no others were asked for."""
    if not spread.counts:
        return []
    here = next(way for way in spread.ways if way.layout == spread.layout)
    ways = {way.gpus: way for way in (*spread.counts, here)}
    rows = [[str(gpus), *_figures(way), way.words if way.fits else str(way.why)] for gpus, way in sorted(ways.items())]
    return [[_("GPUs"), _("peak"), _("time per step"), _("plan")], *rows]


def _figures(way: LayoutPlan) -> list[str]:
    peak = "-" if way.peak is None else format_bytes(way.peak)
    return [peak, "-" if way.seconds is None else format_seconds(way.seconds)]


def _verdict(way: LayoutPlan, spread: Spread) -> str:
    if way.fits and way.layout == spread.layout:
        return _("taken")
    return _("fits; {why}", why=way.why) if way.fits else str(way.why)


def spread_dict(spread: Spread) -> dict[str, Any]:
    """The spread as plain dicts and numbers; bytes and seconds."""
    outside = spread.outside
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
            "seconds": spread.communication.seconds,
            "waiting": spread.communication.exposed,
            "calls": spread.communication.calls,
        },
        "outside_allocator": None
        if outside is None
        else {name: getattr(outside, name) for name in ("communicators", "low", "high", "most")},
        "host_bytes_per_node": spread.host_per_node,
        "assumptions": list(spread.topology.assumptions),
        "ways": [_way_dict(way) for way in spread.ways],
        "other_gpus": [_way_dict(way) for way in spread.counts],
    }


def _way_dict(way: LayoutPlan) -> dict[str, Any]:
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
    return None if layout is None else {name: getattr(layout, name) for name in _FIELDS}
