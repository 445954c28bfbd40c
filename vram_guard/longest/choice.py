"""The longest batch of a training in place of the one that happened to be read first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from vram_guard.capture.loader import Reading, Sample, copied
from vram_guard.forks.fork import ForkRefusedError, Progress, run_in_fork
from vram_guard.language import _
from vram_guard.limits import ANSWER_SECONDS
from vram_guard.longest._extents import shapes_of
from vram_guard.longest._search import Found, Question, look
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
    size, notes = sample.batch_size, list(sample.notes)
    for part in sample.parts:
        question = Question(
            part.loader, sample.batch_size, ranks, by_batches, planned_batch.share, planned_batch.seconds, part.endless
        )
        found, remarks = _looked(question, progress, in_copy=in_copy)
        if found is not None:
            part.sizes = found.sizes
            alone = len(sample.parts) == 1
            which = _take(part, found, size, peak, alone=alone, progress=progress)
            if which is None:
                continue
            size = found.whole[which] if alone else size
            notes = [note for note in notes if note not in part.note]
            notes += [found.words[which], *found.remarks]
        notes += remarks
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


def _looked(question: Question, progress: Progress, *, in_copy: bool) -> tuple[Found | None, list[str]]:
    """The look, and why there is none."""
    progress(_("looking for the longest batch"))
    try:
        if in_copy:
            try:
                most = question.seconds + ANSWER_SECONDS
                return run_in_fork(lambda tell: look(question, tell), progress, most_seconds=most), []
            except ForkRefusedError:
                question = replace(question, alone=False)
        with random_state_kept():
            return look(question, progress), []
    except Exception as error:  # noqa: BLE001 - the user's data set, sampler and classes
        said = f"{type(error).__name__}: {error}"
        return None, [_("the longest batch is not known ({error}): another may take more", error=said)]


def _take(part: Reading, found: Found, size: int, peak: Peak | None, *, alone: bool, progress: Progress) -> int | None:
    """Let a part make the batch that takes the most; its number, or None where it is like the one that was read."""
    numbers = [k for k, whole in enumerate(found.whole) if alone or whole == size]
    if not numbers:
        return None
    first, before = part.samples, _sizes(part.make(size)) if not found.differ else None
    samples = _Samples(part)
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for k in numbers:
        part.take(samples.of(found.batches[k]), found.whole[k], found.batches[k])
        shapes[k] = _sizes(part.make(found.whole[k]))
    # Texts of different lengths, cut or padded to the same one, or not in the batch.
    if before is not None and all(_covers(before, one, first=True) for one in shapes.values()):
        part.take(first)
        return None
    left = [
        k for k in numbers if not any(_covers(shapes[one], shapes[k], first=one < k) for one in numbers if one != k)
    ]
    best = left[0]
    if len(left) > 1 and peak is not None:
        taken = {}
        for k in left:
            progress(_("comparing batches that may be the longest"))
            part.take(samples.of(found.batches[k]), found.whole[k], found.batches[k])
            taken[k] = peak(found.whole[k])
        best = max(left, key=lambda k: taken[k])
    part.take(samples.of(found.batches[best]), found.whole[best], found.batches[best])
    return best


class _Samples:
    """Samples of a part, each read once."""

    def __init__(self, part: Reading) -> None:
        self._dataset = part.loader.dataset
        self._read: dict[int, Any] = {}

    def of(self, numbers: Sequence[int]) -> list[Any]:
        missing = [number for number in numbers if number not in self._read]
        with random_state_kept():
            if missing and isinstance(self._dataset, IterableDataset):
                for number, sample in enumerate(islice(copied(self._dataset), max(numbers) + 1)):
                    self._read[number] = sample
            else:
                self._read |= {number: self._dataset[number] for number in missing}
        return [self._read[number] for number in numbers if number in self._read]


def _sizes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {one.path: one.extents for one in shapes_of(batch, parts=math.inf) if not one.text}


def _covers(one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]], *, first: bool) -> bool:
    """True if a batch is in nothing smaller than another; of two that are alike, if it comes first."""
    if one == other:
        return first
    return one.keys() == other.keys() and all(
        len(shape) == len(other[name]) and all(a >= b for a, b in zip(shape, other[name], strict=True))
        for name, shape in one.items()
    )
