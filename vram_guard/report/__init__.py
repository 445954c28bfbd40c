"""Estimates and plans as people and programs read them.

Tables for terminals (``text``), JSON (``as_json``), one HTML page to send to a colleague (``html``), one SVG picture
(``picture``), a snapshot for PyTorch's memory_viz page (``snapshot``).
"""

from vram_guard.report.html import html_report
from vram_guard.report.saving import save
from vram_guard.report.text import render, show

__all__ = ["html_report", "render", "save", "show"]
