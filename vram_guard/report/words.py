"""What an estimate says about its peak, in the reader's language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.language import _, marked
from vram_guard.limits import NAMED
from vram_guard.module_names import in_a_sentence
from vram_guard.timeline import phase_and_step
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.timeline import Estimate

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


def held_at_peak(estimate: Estimate) -> str:
    """The categories that take most at the peak, with their bytes."""
    largest = sorted(((size, name) for name, size in estimate.breakdown.items() if size), reverse=True)[:NAMED]
    return _(", ").join(f"{category_name(name)} {format_bytes(size)}" for size, name in largest)


def peak_place(estimate: Estimate) -> str:
    """Where the peak is: its phase, module, line of the user's code, and operator."""
    place = (estimate.peak_source, estimate.peak_operator)
    words = (str(phase_and_step(estimate.peak_phase)), in_a_sentence(estimate.peak_module), *place)
    return _(", ").join(filter(None, words))
