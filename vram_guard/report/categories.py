"""Names of the categories of memory, in the reader's language."""

from __future__ import annotations

from vram_guard.language import _, marked

_NAMES = {
    "parameters": marked("parameters"),
    "buffers": marked("buffers"),
    "gradients": marked("gradients"),
    "optimizer_states": marked("optimizer states"),
    "activations": marked("activations"),
    "batch": marked("batch"),
    "temporaries": marked("temporaries"),
    "workspace": marked("workspace"),
}


def category_name(name: str) -> str:
    """A category of :data:`vram_guard.timeline.CATEGORIES` in words."""
    return _(_NAMES[name])
