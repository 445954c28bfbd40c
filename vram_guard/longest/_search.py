"""The search in a data set and its sampler, in a copy of the process: which batch may be the longest."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from vram_guard.capture.apart import SampleSizes, kept_sizes
from vram_guard.capture.loader import copied
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import SAMPLES_ASKED, SAMPLES_CHECKED, SHARE_FOR_ALIKE, SHARE_FOR_BATCHES, SHARE_FOR_SIZES
from vram_guard.longest._batches import Batches, Sizes, as_long, batches_of, candidates
from vram_guard.longest._extents import Shape, by_name, shapes_of
from vram_guard.longest._sources import SizeSource, source_of


@dataclass(frozen=True)
class Found:
    """Batches one of which is the longest, as numbers of samples, and what is known about them.

    Attributes:
        batches: candidates; the first ones of each were read in time.
        whole: samples in each of them.
        words: one line for people on each.
        differ: samples differ in more than the lengths of texts.
        remarks: further lines.
        sizes: of samples, for proofs.
    """

    batches: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]
    words: tuple[str, ...]
    differ: bool
    remarks: tuple[str, ...]
    sizes: SampleSizes


@dataclass(frozen=True)
class Question:
    """A search in one loader.

    Attributes:
        loader: a DataLoader.
        size: samples in a batch.
        ranks: processes among which a framework shares samples out.
        by_batches: it shares out whole batches.
        share: of batches that are to be no longer; None: the longest batch of all.
        seconds: the time limit.
        endless: the sampler starts over when it has been through the data set.
        alone: in a copy of the process, where samplers may be drawn from.
    """

    loader: Any
    size: int
    ranks: int = 1
    by_batches: bool = False
    share: float | None = None
    seconds: float = 2.0
    endless: bool = False
    alone: bool = True


def look(question: Question, progress: Callable[[str], None]) -> Found | None:
    """The batches that may be the longest; None where all samples are alike.

    Call it where random numbers may be drawn.

    Raises:
        UnsupportedStepError: sizes of samples or batches of the sampler are not known.
    """
    return None if isinstance(question.loader.dataset, TensorDataset) else _Search(question, progress).found()


class _Search:
    """A search, and the samples that it has read."""

    def __init__(self, question: Question, progress: Callable[[str], None]) -> None:
        self._question = question
        self._dataset = question.loader.dataset
        self._stream = isinstance(self._dataset, IterableDataset)
        self._count = 0 if self._stream else len(self._dataset)
        self._progress = progress
        self._remarks: list[str] = []
        self._read: dict[int, tuple[Shape, ...]] = {}
        self._begun = time.monotonic()

    def found(self) -> Found | None:
        question = self._question
        source = None if self._stream else source_of(question.loader, self._count, self._remarks)
        sizes = None if source is None else self._sizes(source)
        if source is None or sizes is None or not self._borne_out(sizes, source):
            if self._stream:
                source, sizes = SizeSource((), self._extents, _("reading the stream")), self._of_stream()
            else:
                source = SizeSource((), self._extents, _("reading them"))
                sizes = self._sizes(source)
        elif self._alike():
            return None
        if len(sizes.known) == 0:
            raise UnsupportedStepError(_("no sample told its size within {seconds} s", seconds=question.seconds))
        sizes = sizes.distinct()
        if not sizes.names:
            return None
        batches = self._batches()
        chosen, looked_at = candidates(batches, sizes, question.share)
        read = self._readable(chosen)
        if self._alike():
            return None
        pairs = [(batch, numbers) for batch, numbers in zip(chosen, read, strict=True) if numbers]
        return Found(
            tuple(numbers for _batch, numbers in pairs),
            tuple(question.size if self._stream else len(batch) for batch, _numbers in pairs),
            tuple(self._words(batch, batches, sizes, source, looked_at) for batch, _numbers in pairs),
            differ=len({tuple(one for one in shapes if not one.text) for shapes in self._read.values()}) > 1,
            remarks=tuple(self._remarks),
            sizes=kept_sizes(sizes.known, sizes.values[sizes.known]),
        )

    def _batches(self) -> Batches:
        question = self._question
        if self._stream:
            read, size = len(self._read), question.size
            return Batches(-(-read // size), pool=torch.arange(read), size=min(size, read))
        return batches_of(
            question.loader,
            question.size,
            self._count,
            question.ranks,
            by_batches=question.by_batches,
            endless=question.endless,
            seconds=SHARE_FOR_BATCHES * question.seconds if question.alone else 0.0,
        )

    def _past(self, share: float) -> bool:
        """True once this share of the time is over."""
        return time.monotonic() - self._begun > share * self._question.seconds

    def _alike(self) -> bool:
        return len(self._read) > 1 and len(set(self._read.values())) == 1

    def _settled(self) -> bool:
        """True if samples have been alike for so long that the others are believed to be so."""
        return self._past(SHARE_FOR_ALIKE) and self._alike()

    def _readable(self, chosen: list[torch.Tensor]) -> list[tuple[int, ...]]:
        """The samples of each of these batches that can be read in time, the first ones; one of them at least."""
        self._progress(_("reading the samples of the longest batch"))
        read: list[list[int]] = [[] for _batch in chosen]
        for batch, numbers in zip(chosen, read, strict=True):
            for number in batch.tolist():
                if self._past(1) and any(read):
                    break
                if number not in self._read:
                    self._extents(number)
                numbers.append(number)
        return [tuple(numbers) for numbers in read]

    # --- sizes ------------------------------------------------------------------------------------------------

    def _extents(self, number: int) -> dict[str, int]:
        """Of one sample, which is read."""
        self._read[number] = tuple(shapes_of(self._dataset[number]))
        return by_name(self._read[number])

    def _of_stream(self) -> Sizes:
        """Of the first samples, of which any may come together: the rest is not known."""
        asked: dict[int, Any] = {}
        for number, sample in enumerate(islice(copied(self._dataset), SAMPLES_ASKED)):
            self._read[number] = tuple(shapes_of(sample))
            asked[number] = by_name(self._read[number])
            if self._past(SHARE_FOR_SIZES) or self._settled():
                break
        return _table((), asked, len(asked))

    def _sizes(self, source: SizeSource) -> Sizes:
        """All sizes of a source, or those of samples from all over the data set that answered in time."""
        if isinstance(source.read, torch.Tensor):
            return Sizes(source.names, source.read)
        asked: dict[int, Any] = {}
        failed = 0
        shown = time.monotonic()
        for number in _spread(self._count):
            if asked and (self._past(SHARE_FOR_SIZES) or (not source.names and self._settled())):
                break
            try:
                asked[number] = source.read(number)
            except Exception as error:  # noqa: BLE001 - the user's own data set
                failed += 1
                if failed == 1:
                    said = f"{type(error).__name__}: {error}"
                    self._remarks.append(_("sample {number} tells no size: {error}", number=number, error=said))
            if time.monotonic() - shown > 1:
                shown = time.monotonic()
                self._progress(_("sizes of {known} of {count} samples", known=len(asked), count=self._count))
        return _table(source.names, asked, self._count)

    def _borne_out(self, sizes: Sizes, source: SizeSource) -> bool:
        """True unless one sample is smaller than another that is said to be larger in nothing."""
        known = sizes.known
        if len(known) == 0:
            return False
        order = known[sizes.areas[known].argsort()]
        numbers = order[torch.linspace(0, len(order) - 1, min(SAMPLES_CHECKED, len(order))).long()].tolist()
        for number in reversed(numbers):
            if not self._past(1):
                self._extents(number)
        read = {number: _amount(self._read[number]) for number in numbers if number in self._read}
        for one, other in itertools.permutations(read, 2):
            said, less = sizes.values[one], sizes.values[other]
            if (said >= less).all() and (said > less).any() and read[one] < read[other]:
                self._remarks.append(
                    _(
                        "sizes by {source} are not used: sample {one} is said to have {said}, and is smaller than "
                        "sample {other}, which is said to have {less}",
                        source=source.words,
                        one=one,
                        said=" x ".join(map(str, said.tolist())),
                        other=other,
                        less=" x ".join(map(str, less.tolist())),
                    )
                )
                return False
        return True

    # --- words ------------------------------------------------------------------------------------------------

    def _words(self, batch: torch.Tensor, batches: Batches, sizes: Sizes, source: SizeSource, looked_at: int) -> str:
        """One line: what is planned for, how often it occurs, and what it was found by."""
        question = self._question
        largest = sizes.values[batch].clamp(min=0).amax(0).tolist()
        names = [f"size{name}" if name[:1] in ("", "[") else name for name in sizes.names]
        named = ", ".join(f"{name} {size}" for name, size in zip(names, largest, strict=True))
        facts = {"samples": len(batch), "sizes": named}
        if question.share is None:
            parts = [_("the longest batch is planned for: {samples} samples of up to {sizes}", **facts)]
            if not self._stream:
                times, per_epoch = as_long(batch, batches, sizes), batches.per_epoch
                said = _("at most {times} of {batches} batches of an epoch are so long", times=times, batches=per_epoch)
                parts.append(said)
        else:
            parts = [
                _("a long batch is planned for: {samples} samples of up to {sizes}", **facts),
                _(
                    "{share} of {count} batches are no longer, and longer ones are left to the recovery from "
                    "out-of-memory errors",
                    share=f"{100 * question.share:.4g}%",
                    count=looked_at,
                ),
            ]
        known, count = len(sizes.known), len(sizes.values)
        if known < count or self._stream:
            said = _(
                "{known} of {count} samples are known, by {source} for {seconds} s; longer ones among the others are "
                "not planned for",
                known=known,
                count=_("unknown many") if self._stream else count,
                source=source.words,
                seconds=f"{question.seconds:g}",
            )
        else:
            said = _("sizes of all {count} samples are known by {source}", count=count, source=source.words)
        return "; ".join(filter(None, [*parts, batches.remark, said]))


def _amount(shapes: tuple[Shape, ...]) -> int:
    """Numbers and characters of a sample."""
    return sum(math.prod(one.extents) for one in shapes)


def _spread(count: int) -> Iterator[int]:
    """Numbers from all over, each once."""
    if count > SAMPLES_ASKED:
        yield from torch.linspace(0, count - 1, SAMPLES_ASKED, dtype=torch.float64).long().tolist()
    else:
        yield from torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def _table(names: tuple[str, ...], asked: dict[int, Any], count: int) -> Sizes:
    """Sizes by the number of the sample, of what was answered."""
    if not names:
        names = tuple(dict.fromkeys(name for extents in asked.values() for name in extents))
        asked = {number: [extents.get(name, 0) for name in names] for number, extents in asked.items()}
    values = torch.full((count, len(names)), -1)
    right = {number: row for number, row in asked.items() if len(row) == len(names) and min(row, default=0) >= 0}
    if right and names:
        values[torch.tensor(list(right))] = torch.tensor(list(right.values()))
    return Sizes(names, values)
