"""The longest batch of a training in place of the one that happened to be read first."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from vram_guard.capture.loader import Reading, Sample
from vram_guard.forks.fork import ForkRefusedError, Progress, run_in_fork
from vram_guard.language import _
from vram_guard.limits import ANSWER_SECONDS
from vram_guard.longest._search import Found, LongBatch, Search
from vram_guard.longest._sizes import shapes_of
from vram_guard.simulate import DEFAULT_CAPABILITY, trace_at
from vram_guard.state.random_generators import random_state_kept

if TYPE_CHECKING:
    from vram_guard.longest.planned_batch import PlannedBatch
    from vram_guard.step import TrainingStep

Peak = Callable[[int], Any]
"""Batch size -> what the step takes with the batch that is chosen at the moment; comparable."""


def choose(
    sample: Sample,
    planned_batch: PlannedBatch,
    *,
    ranks: int = 1,
    by_batches: bool = False,
    peak: Peak | None = None,
    progress: Progress = lambda _line: None,
    in_copy: bool = True,
) -> Sample:
    """A sample that delivers the longest batch that its loader can make, and says so in its notes.

    Args:
        sample: as it was read; its parts are changed.
        planned_batch: which batch is meant.
        ranks: processes among which the framework shares samples out.
        by_batches: it shares out whole batches.
        peak: compares batches that are the largest in different ways; None: the one that is the largest when padded.
        progress: called with a line of text before each slow part.
        in_copy: look in a copy of the process, which samplers and data sets may change; False where this is one.
    """
    if planned_batch.longest == "first":
        return sample
    progress(_("looking for the longest batch"))
    size, notes = sample.batch_size, list(sample.notes)
    for part in sample.parts:
        if isinstance(part.loader.dataset, IterableDataset):
            continue  # the largest of its first samples stands for all, and its note says so
        search = Search(part, sample.batch_size, planned_batch, ranks, by_batches=by_batches)
        try:
            found = _looked(search, progress, planned_batch.seconds, in_copy=in_copy)
        except Exception as error:  # noqa: BLE001 - the user's data set, sampler and classes
            said = f"{type(error).__name__}: {error}"
            notes.append(_("the longest batch is not known ({error}): another may take more", error=said))
            continue
        if found is None:
            continue
        part.sizes = found.sizes
        alone = len(sample.parts) == 1
        taken = _take(part, found, size, peak, alone=alone)
        if taken is not None:
            size = taken.size if alone else size
            notes = [*(note for note in notes if note not in part.note), taken.words]
    return replace(sample, batch_size=size, notes=tuple(notes))


def longest_beside(
    read: Callable[[], Sample], planned_batch: PlannedBatch, *, ranks: int = 1
) -> tuple[Sample | None, tuple[str, ...]]:
    """The longest batch of an evaluation, which one of its rounds has, and what is to be said of it.

    Args:
        read: the loader, anew.
        planned_batch: which batch is meant.
        ranks: processes among which the framework shares samples out.

    Returns:
        None where its batches are like the first ones, or it is not known.
    """
    with random_state_kept():
        sample = read()
    sample = choose(sample, planned_batch, ranks=ranks)
    return sample if any(part.numbers for part in sample.parts) else None, sample.notes


def peak_of(step: TrainingStep, capability: tuple[int, int] = DEFAULT_CAPABILITY) -> Peak:
    """The memory of a step, by tracing it at one batch size; what else its job has is the same with every batch."""
    step = step.with_(job=None)

    def peak(size: int) -> tuple[int, int]:
        taken = trace_at(step, size, compute_capability=capability).at(size)
        return taken.peak_reserved, taken.peak_allocated

    return peak


def _looked(search: Search, progress: Progress, seconds: float, *, in_copy: bool) -> Found | None:
    if in_copy:
        with suppress(ForkRefusedError):
            return run_in_fork(lambda _tell: search.found(alone=True), progress, most_seconds=seconds + ANSWER_SECONDS)
    with random_state_kept():
        return search.found(alone=not in_copy)


def _take(part: Reading, found: Found, size: int, peak: Peak | None, *, alone: bool) -> LongBatch | None:
    """Let a part make the batch that takes the most, and say which; None where it is like the one that was read."""
    first, before = part.samples, _sizes(part.make(size)) if not found.differ else None
    read: dict[int, Any] = {}

    def take(one: LongBatch) -> None:
        with random_state_kept():
            read.update({number: part.loader.dataset[number] for number in one.numbers if number not in read})
        part.take([read[number] for number in one.numbers], one.size, one.numbers)

    shapes: dict[LongBatch, dict[str, tuple[int, ...]]] = {}
    for one in found.candidates:
        if alone or one.size == size:
            take(one)
            made = _sizes(part.make(one.size))
            if made not in shapes.values():
                shapes[one] = made
    # Texts of different lengths, cut or padded to the same one, or not in the batch.
    if not shapes or (before is not None and all(_covers(before, made) for made in shapes.values())):
        part.take(first)
        return None
    best, *others = (
        one
        for one, made in shapes.items()
        if not any(_covers(other, made) for other in shapes.values() if other != made)
    )
    if others and peak is not None:
        peaks = {}
        for one in (best, *others):
            take(one)
            peaks[one] = peak(one.size)
        best = max(peaks, key=lambda one: peaks[one])
    take(best)
    return best


def _sizes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {one.path: one.extents for one in shapes_of(batch, parts=math.inf) if not one.text}


def _covers(one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> bool:
    """True if a batch is in nothing smaller than another."""
    return one.keys() == other.keys() and all(
        len(shape) == len(other[name]) and all(a >= b for a, b in zip(shape, other[name], strict=True))
        for name, shape in one.items()
    )
