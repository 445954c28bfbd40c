"""Changes that make a fine-tuning fit, by the closed form: each by itself, then combined until it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vram_guard.closed_form.tuning import DTYPES, Tuning
from vram_guard.language import marked


@dataclass(frozen=True)
class Measure:
    """One thing to change, and what the training then takes."""

    name: str
    """In English, a message of the catalogues."""
    key: str
    """For programs."""
    tuning: Tuning

    def fits(self, usable: int) -> bool:
        """True where the training under this measure is known to stay within ``usable`` bytes."""
        return self.tuning.complete and self.tuning.total <= usable


#: (name, key, change): what changes the training least comes first.
_MEASURES: tuple[tuple[str, str, Callable[[Tuning], Tuning]], ...] = (
    (marked("activation checkpointing"), "checkpoint", lambda one: replace(one, checkpointed=True)),
    (
        marked("frozen models on the host, one at a time"),
        "offload_frozen",
        lambda one: replace(one, frozen_on_host=True),
    ),
    (
        marked("a micro-batch of one sample with gradient accumulation"),
        "accumulate",
        lambda one: replace(one, batch=1),
    ),
    (marked("AdamW with states in 8 bit"), "8bit", lambda one: replace(one, state_bytes=1)),
    (marked("optimizer states on the host"), "offload_optimizer", lambda one: replace(one, states_on_host=True)),
    (
        marked("weights in half precision"),
        "half",
        lambda one: replace(one, dtype="bfloat16") if DTYPES[one.dtype] > 2 else one,
    ),
)


def individual_savings(tuning: Tuning) -> tuple[Measure, ...]:
    """Every measure that changes something, each by itself."""
    return tuple(
        Measure(name, key, changed)
        for name, key, change in _MEASURES
        if (changed := change(tuning)).total < tuning.total
    )


def combined_savings(tuning: Tuning, usable: int) -> tuple[Measure, ...]:
    """Measures on top of each other until it fits, none of them needless.

    Empty where it fits as it is, or where all of them are not enough.
    """
    taken = list[int]()
    for number in range(len(_MEASURES)):
        present = _changed(tuning, taken)
        if present.total <= usable:
            break
        if _changed(tuning, [*taken, number]).total < present.total:
            taken.append(number)
    if not taken or not _fits(tuning, taken, usable):
        return ()
    for number in reversed(taken):
        without = [other for other in taken if other != number]
        if _fits(tuning, without, usable):
            taken = without
    steps = [(number, _changed(tuning, taken[: place + 1])) for place, number in enumerate(taken)]
    return tuple(Measure(*_MEASURES[number][:2], changed) for number, changed in steps)


def _changed(tuning: Tuning, numbers: list[int]) -> Tuning:
    for number in numbers:
        tuning = _MEASURES[number][2](tuning)
    return tuning


def _fits(tuning: Tuning, numbers: list[int], usable: int) -> bool:
    changed = _changed(tuning, numbers)
    return changed.complete and changed.total <= usable
