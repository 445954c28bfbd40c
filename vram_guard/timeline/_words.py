"""Phases of a run in words."""

from __future__ import annotations

from vram_guard.language import Message, marked
from vram_guard.printable import printable
from vram_guard.timeline._values import STEP_PHASES, Phase, PhasePeak, StretchName

_NAMES: dict[StretchName, str] = {
    "setup": marked("setup"),
    "hooks": marked("work in hooks"),
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


def named_phase(name: StretchName) -> Message:
    """A phase by its name alone."""
    return Message(_NAMES[name])


def phase_words(phase: Phase | PhasePeak) -> Message:
    """A phase, with what tells it from others of its name."""
    name = named_phase(phase.name)
    return Message("{name} ({label})", name=name, label=printable(phase.label, lines=False)) if phase.label else name


def phase_and_step(phase: Phase | PhasePeak) -> Message:
    """A phase with its optimizer step, where it is one of a step's, or comes after one."""
    words = phase_words(phase)
    if not phase.step:
        return words
    if phase.name in STEP_PHASES or phase.name == "training":
        return Message("{phase}, step {count}", phase=words, count=phase.step)
    return Message("{phase}, after step {count}", phase=words, count=phase.step)
