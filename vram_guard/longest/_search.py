"""The search in a data set and its sampler, in a copy of the process: which batch may be the longest."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from vram_guard.capture.apart import SampleSizes, kept_sizes
from vram_guard.capture.loader import Reading
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import SAMPLES_ASKED, SAMPLES_CHECKED, SHARE_FOR_ALIKE, SHARE_FOR_BATCHES, SHARE_FOR_SIZES
from vram_guard.longest._batches import batches_of, candidates
from vram_guard.longest._sizes import Shape, Sizes, shapes_of, table_of, told_sizes
from vram_guard.longest.planned_batch import PlannedBatch


class LongBatch(NamedTuple):
    """A batch that may be the longest."""

    numbers: tuple[int, ...]
    """Of its samples, the largest first: of the first ones, which were read in time."""
    size: int
    """Samples in it."""
    words: str
    """One line for people."""


class Found(NamedTuple):
    """Batches one of which is the longest, and what is known about them."""

    candidates: tuple[LongBatch, ...]
    differ: bool
    """True where samples differ in more than the lengths of texts."""
    sizes: SampleSizes
    """Of samples, for proofs."""


class Search:
    """A search in one loader, and the samples that it has read.

    Args:
        part: the loader.
        size: samples in a batch.
        planned_batch: which batch is meant.
        ranks: processes among which a framework shares samples out.
        by_batches: it shares out whole batches.
    """

    def __init__(self, part: Reading, size: int, planned_batch: PlannedBatch, ranks: int, *, by_batches: bool) -> None:
        self._part, self._dataset = part, part.loader.dataset
        self._size, self._planned = size, planned_batch
        self._ranks, self._by_batches = ranks, by_batches
        self._count = len(self._dataset)
        self._read: dict[int, tuple[Shape, ...]] = {}
        self._begun = time.monotonic()

    def found(self, *, alone: bool) -> Found | None:
        """The batches that may be the longest; None where all samples are alike.

        Call it where random numbers may be drawn.

        Args:
            alone: in a copy of the process, where samplers may be drawn from.

        Raises:
            UnsupportedStepError: sizes of samples or batches of the sampler are not known.
        """
        if isinstance(self._dataset, TensorDataset):
            return None
        self._begun = time.monotonic()
        told = self._told()
        sizes = (self._of_read() if told is None else told).distinct()
        if len(sizes.values) == 0 or (not self._read and told is None):
            raise UnsupportedStepError(_("no sample told its size within {seconds} s", seconds=self._planned.seconds))
        if self._alike() or not sizes.names:
            return None
        batches, remark = batches_of(
            self._part,
            self._size,
            sizes,
            self._ranks,
            by_batches=self._by_batches,
            seconds=SHARE_FOR_BATCHES * self._planned.seconds if alone else 0.0,
        )
        chosen = candidates(batches, sizes)
        read = [self._readable(batch.tolist()) for batch in chosen]
        if self._alike():
            return None
        after = [*([remark] if remark else []), self._source(sizes, told=told is not None)]
        words = ["; ".join([self._words(batch, sizes), *after]) for batch in chosen]
        return Found(
            tuple(map(LongBatch, read, map(len, chosen), words)),
            differ=len({tuple(one for one in shapes if not one.text) for shapes in self._read.values()}) > 1,
            sizes=kept_sizes(sizes.known, sizes.values[sizes.known]),
        )

    def _past(self, share: float) -> bool:
        """True once this share of the time is over."""
        return time.monotonic() - self._begun > share * self._planned.seconds

    def _alike(self) -> bool:
        return len(self._read) > 1 and len(set(self._read.values())) == 1

    def _shapes(self, number: int) -> tuple[Shape, ...]:
        """Of one sample, which is read once."""
        if number not in self._read:
            self._read[number] = tuple(shapes_of(self._dataset[number]))
        return self._read[number]

    def _readable(self, numbers: list[int]) -> tuple[int, ...]:
        """The first of these samples that can be read in time; one of them at least."""
        read: list[int] = []
        for number in numbers:
            if read and self._past(1):
                break
            self._shapes(number)
            read.append(number)
        return tuple(read)

    def _told(self) -> Sizes | None:
        """Sizes that the sampler or the data set tells, where samples that are read bear them out."""
        try:
            sizes = told_sizes(self._part.loader, self._count)
        except Exception:  # noqa: BLE001 - attributes of the user's own class
            return None
        return sizes if sizes is not None and self._borne_out(sizes) else None

    def _borne_out(self, sizes: Sizes) -> bool:
        """True unless one sample is smaller than another that is said to be larger in nothing."""
        order = sizes.areas.argsort(descending=True)
        numbers = order[torch.linspace(0, len(order) - 1, min(SAMPLES_CHECKED, len(order))).long()].tolist()
        amounts = {one: sum(math.prod(shape.extents) for shape in self._shapes(one)) for one in self._readable(numbers)}
        return not any(
            bool((sizes.values[one] >= sizes.values[other]).all() and (sizes.values[one] > sizes.values[other]).any())
            and amounts[one] < amounts[other]
            for one, other in itertools.permutations(amounts, 2)
        )

    def _of_read(self) -> Sizes:
        """Of samples from all over the data set that are read in time."""
        drawn = torch.Generator().manual_seed(0)
        if self._count > SAMPLES_ASKED:
            numbers = torch.randint(self._count, (SAMPLES_ASKED,), generator=drawn)
        else:
            numbers = torch.randperm(self._count, generator=drawn)
        for number in numbers.tolist():
            with contextlib.suppress(Exception):  # the user's own data set
                self._shapes(number)
            if self._settled():
                break
        return table_of(self._read, self._count)

    def _settled(self) -> bool:
        """True once enough is read; samples that have been alike for so long are believed to be all alike."""
        enough = self._past(SHARE_FOR_SIZES) or (self._past(SHARE_FOR_ALIKE) and self._alike())
        return bool(self._read) and enough

    def _words(self, batch: torch.Tensor, sizes: Sizes) -> str:
        """The batch that is planned for."""
        largest = sizes.values[batch].clamp(min=0).amax(0).tolist()
        names = [f"size{name}" if name[:1] in ("", "[") else name for name in sizes.names]
        said = ", ".join(f"{name} {size}" for name, size in zip(names, largest, strict=True))
        return _("the longest batch is planned for: {samples} samples of up to {sizes}", samples=len(batch), sizes=said)

    def _source(self, sizes: Sizes, *, told: bool) -> str:
        """The place that the sizes come from."""
        if told:
            return _("sizes of all {count} samples are those that the data set tells", count=self._count)
        if len(sizes.known) == self._count:
            return _("all {count} samples were read", count=self._count)
        return _(
            "{known} of {count} samples were read in {seconds} s; longer ones among the others are not planned for",
            known=len(sizes.known),
            count=self._count,
            seconds=f"{self._planned.seconds:g}",
        )
