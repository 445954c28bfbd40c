"""Text inside of HTML and SVG."""

from __future__ import annotations

import html

from vram_guard.printable import printable


def escape(text: str) -> str:
    """The text for an element or a quoted attribute, whatever characters it has."""
    return html.escape(printable(text))
