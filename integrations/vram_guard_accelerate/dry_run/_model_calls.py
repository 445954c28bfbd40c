"""Calls of a script's prepared models, and how their arguments are cut into slices of a batch.

A list of three pictures of three channels reads as three samples or as three columns of three samples, and a sequence
with its time first reads as a batch where it is as long as the batch. A real launch sees one size only. So the calls of
the dry run are read at sizes that differ, and count where two sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vram_guard.apply.microbatch import (
    PROBED_SIZES,
    CannotSplitError,
    Layout,
    MicroBatch,
    batch_size,
    read_layout,
    split,
)
from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.simulate import TRACED_SIZES
from vram_guard.tensors import without_modes


@dataclass(frozen=True)
class ModelCall:
    """One way in which a prepared model is called."""

    model: int
    """Its number, in the order of ``prepare``."""
    layout: Layout | None
    """Of the arguments by name; None where they cannot be cut."""
    batches: int = 1
    """How often the samples of the training's batch are in it: twice where real and made ones are judged together."""
    why_not: str = ""
    """The reason why they cannot be cut."""


def read_call(model: int, called: dict[str, Any], size: int) -> ModelCall:
    """Read a call.

    Args:
        model: the number of the model.
        called: the arguments, of :func:`vram_guard.apply.sliced_forward.by_name`.
        size: samples of the training's batch.
    """
    try:
        try:
            return ModelCall(model, read_layout(called, size))
        except CannotSplitError:
            samples = batch_size(called)
            if samples % size:
                raise
            return ModelCall(model, read_layout(called, samples), samples // size)
    except CannotSplitError as error:
        return ModelCall(model, None, why_not=str(error))


def single_samples(called: dict[str, Any], samples: int) -> list[MicroBatch] | None:
    """The arguments of a call, cut; None where they cannot be."""
    try:
        with without_modes():
            return split(called, samples, 1)
    except CannotSplitError:
        return None


def agreed_layouts(
    calls_at: Callable[[int], Sequence[ModelCall]], models: int
) -> tuple[tuple[Layout | None, ...], str]:
    """The layouts of all models' arguments, and why models cannot work in slices ("" where they can).

    A model that is called in several ways has None: each call is read by itself.

    Args:
        calls_at: batch size -> the calls of the loop; sizes at which it fails are passed over.
        models: how many there are.

    Raises:
        VramGuardError: it fails at a size that the planner needs as well.
    """
    seen: list[Sequence[ModelCall]] = []
    for size in (*TRACED_SIZES, *PROBED_SIZES):  # the planner asks for the first ones anyway
        try:
            calls = calls_at(size)
        except VramGuardError:
            if size in TRACED_SIZES:
                raise
            continue
        found, why = layouts_of(calls, models)
        if why or calls in seen:
            return found, why
        seen.append(calls)
    return (), _("what the models are called with differs from batch size to batch size")


def layouts_of(calls: Sequence[ModelCall], models: int) -> tuple[tuple[Layout | None, ...], str]:
    """The same as calls of one size read."""
    unread = [call.why_not for call in calls if call.layout is None]
    if unread:
        return (), unread[0]
    return tuple(_only([call.layout for call in calls if call.model == at]) for at in range(models)), ""


def _only(layouts: list[Layout | None]) -> Layout | None:
    first = layouts[0] if layouts else None
    return first if first is not None and _travels(first) and all(one == first for one in layouts) else None


def _travels(layout: Layout) -> bool:
    """Whether its keys stay what they are in JSON."""
    return all(type(key) in (str, int) and _travels(child) for key, child in (layout.parts or {}).items())
