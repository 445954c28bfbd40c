"""Estimates and plans as people and programs read them.

Tables for terminals (``text``), JSON (``as_json``), one HTML page to send to a colleague (``html``), one SVG picture
(``picture``), a snapshot for PyTorch's memory_viz page (``snapshot``). Each is imported on first use and costs only
those who use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_guard.report.html import html_report
    from vram_guard.report.saving import save
    from vram_guard.report.text import render, show

# Names of functions only, none of which is a module's: importing the module would replace the function.
__all__ = ["html_report", "render", "save", "show"]

_HOME = {"html_report": "html", "render": "text", "save": "saving", "show": "text"}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"vram_guard.report.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
