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


#: Phases of a run, :data:`vram_guard.timeline.PhaseName`, and its training steps together.
PHASES = {
    "setup": marked("setup"),
    "batch": marked("batch"),
    "forward": marked("forward"),
    "backward": marked("backward"),
    "optimizer": marked("optimizer"),
    "training": marked("training"),
    "resuming": marked("resuming"),
    "validation": marked("validation"),
    "saving": marked("saving"),
    "test": marked("test"),
    "prediction": marked("prediction"),
    "generation": marked("generation"),
}


def category_name(name: str) -> str:
    """A category of :data:`vram_guard.timeline.CATEGORIES` in words."""
    return _(_NAMES[name])
