"""Estimates and plans as people and programs read them.

Tables for terminals (``text``), JSON (``as_json``), pictures (``plot``: needs matplotlib), one HTML page
to send to a colleague (``html``), a trace for Perfetto and Chrome (``trace_events``), a snapshot for PyTorch's
memory_viz page (``snapshot``). Each is imported on first use and costs only those who use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_guard.report.as_json import write_json
    from vram_guard.report.html import html_report, save_html
    from vram_guard.report.plot import batch_figure, budget_figure, plan_figure, save_figure, timeline_figure
    from vram_guard.report.snapshot import save_snapshot
    from vram_guard.report.text import render, show
    from vram_guard.report.trace_events import save_trace

# Names of functions only, none of which is a module's: importing the module would replace the function.
__all__ = [
    "batch_figure",
    "budget_figure",
    "html_report",
    "plan_figure",
    "render",
    "save_figure",
    "save_html",
    "save_snapshot",
    "save_trace",
    "show",
    "timeline_figure",
    "write_json",
]

_HOME = {
    "batch_figure": "plot",
    "budget_figure": "plot",
    "html_report": "html",
    "plan_figure": "plot",
    "render": "text",
    "save_figure": "plot",
    "save_html": "html",
    "save_snapshot": "snapshot",
    "save_trace": "trace_events",
    "show": "text",
    "timeline_figure": "plot",
    "write_json": "as_json",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"vram_guard.report.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
