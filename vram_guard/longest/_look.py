"""The look at a data set and its sampler, in a copy of the process: which batch may be the longest."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, TensorDataset

from vram_guard.capture.apart import SampleSizes, kept_sizes
from vram_guard.capture.loader import copied
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.longest._candidates import Sizes, candidates, share_as_long
from vram_guard.longest._extents import Shape, by_name, shapes_of
from vram_guard.longest._limit import TimeIsUpError, TimeLimit, at_most
from vram_guard.longest._orders import Orders, Pool, orders_of
from vram_guard.longest._sources import Source, column_of, source_of
from vram_guard.longest.file_sizes import FileSizes

#: Shares of the time limit: for sizes, for drawing from the sampler; the rest is for the chosen samples themselves.
_FOR_SIZES, _FOR_ORDERS = 0.6, 0.15

#: Share after which samples that were all alike are believed to be so.
_FOR_ALIKE = 0.05

#: Samples at whose sizes is looked at the most, where each has to be asked for.
_MOST_ASKED = 1_000_000

#: Samples of a stream that are looked at, at most.
_MOST_OF_STREAM = 10_000

#: Samples, spread over the data set, that have to bear out what it says of their sizes.
_CHECKED = 6


@dataclass(frozen=True)
class Found:
    """Batches one of which is the longest, as numbers of samples, and what is known about them.

    Attributes:
        batches: candidates; the first ones of each were read in time.
        whole: samples in each of them.
        words: one line for people on each.
        differ: samples differ in more than the lengths of texts.
        remarks: further lines.
        learned: worth keeping for the next run.
        sizes: of samples, for proofs.
    """

    batches: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]
    words: tuple[str, ...]
    differ: bool
    remarks: tuple[str, ...] = ()
    learned: FileSizes | None = None
    sizes: SampleSizes | None = None


@dataclass(frozen=True)
class Question:
    """A look at one loader.

    Attributes:
        loader: a DataLoader.
        size: samples in a batch.
        ranks: processes among which a framework shares samples out.
        by_batches: it shares out whole batches.
        quantile: None: the longest batch of all.
        seconds: the time limit.
        endless: the sampler starts over when it has been through the data set.
        alone: in a copy of the process: code that takes too long is interrupted, and samplers are drawn from.
    """

    loader: Any
    size: int
    ranks: int = 1
    by_batches: bool = False
    quantile: float | None = None
    seconds: float = 2.0
    endless: bool = False
    alone: bool = True


def look(question: Question, progress: Callable[[str], None]) -> Found | None:
    """The batches that may be the longest; None where all samples are alike, or nothing is known of them.

    Call it where random numbers may be drawn.
    """
    try:
        if isinstance(question.loader.dataset, IterableDataset):
            return _look_at_stream(question)
        return _Look(question, progress).found()
    except TimeIsUpError:  # an alarm between the end of a block and its being switched off
        raise UnsupportedStepError(_("it took longer than {seconds} s", seconds=question.seconds)) from None


class _Look:
    """A look at a data set with an index."""

    def __init__(self, question: Question, progress: Callable[[str], None]) -> None:
        self._question = question
        self._dataset = question.loader.dataset
        self._count = len(self._dataset)
        self._progress = progress
        self._remarks: list[str] = []
        self._read: dict[int, _Read] = {}
        self._kinds: set[tuple[Shape, ...]] = set()
        self._limit = TimeLimit(question.seconds)

    def found(self) -> Found | None:
        question, count = self._question, self._count
        if isinstance(self._dataset, TensorDataset):
            return None
        source: Source | None = None
        with self._at_most(_FOR_SIZES):
            source = _of_sampler(question.loader, count) or source_of(self._dataset, count, self._remarks)
        sizes = None if source is None else self._sizes(source)
        if source is None or sizes is None or not self._borne_out(sizes, source):
            source = Source((), self._extents, _("reading them"))
            sizes = self._sizes(source)
        elif self._alike():
            return None
        if len(sizes.known) == 0:
            raise UnsupportedStepError(_("no sample told its size within {seconds} s", seconds=question.seconds))
        sizes = sizes.distinct()
        if not sizes.names:
            return None
        seconds = _FOR_ORDERS * question.seconds if question.alone else 0.0
        by = question.by_batches
        orders = orders_of(question.loader, question.size, count, question.ranks, seconds, by_batches=by)
        chosen, looked_at = candidates(orders, sizes, question.quantile)
        read = self._answering(chosen)
        if not any(read):
            raise UnsupportedStepError(
                _("none of its samples could be read within {seconds} s", seconds=question.seconds)
            )
        if self._alike():
            return None
        return Found(
            tuple(numbers for numbers in read if numbers),
            tuple(len(batch) for batch, numbers in zip(chosen, read, strict=True) if numbers),
            tuple(
                _words(question, batch, orders, sizes, source, looked_at)
                for batch, numbers in zip(chosen, read, strict=True)
                if numbers
            ),
            differ=len({one.without_texts for one in self._read.values()}) > 1,
            remarks=tuple(self._remarks),
            learned=None if source.learned is None else source.learned(),
            sizes=kept_sizes(sizes.known, sizes.values[sizes.known]),
        )

    def _at_most(self, share: float) -> at_most:
        """A share of the time, as far as it is left."""
        seconds = min(share * self._question.seconds, self._limit.left)
        if share == 1:  # the last part: what went before may have taken longer than it should
            seconds = max(seconds, _FOR_ORDERS * self._question.seconds)
        return at_most(seconds, interrupt=self._question.alone)

    def _alike(self) -> bool:
        return len(self._read) > 1 and len(self._kinds) == 1

    def _answering(self, chosen: list[torch.Tensor]) -> list[tuple[int, ...]]:
        """The samples of each of these batches that can be read in time, the first ones."""
        self._progress(_("reading the samples of the longest batch"))
        read: list[list[int]] = [[] for _batch in chosen]
        with self._at_most(1.0) as limit:
            for batch, numbers in zip(chosen, read, strict=True):
                for number in batch.tolist():
                    limit.check()
                    if number not in self._read:
                        self._extents(number)
                    numbers.append(number)
        return [tuple(numbers) for numbers in read]

    # --- sizes ------------------------------------------------------------------------------------------------

    def _extents(self, number: int) -> dict[str, int]:
        """Of one sample, which is read."""
        shapes = tuple(shapes_of(self._dataset[number]))
        self._kinds.add(shapes)
        self._read[number] = _Read(shapes)
        return by_name(shapes)

    def _sizes(self, source: Source) -> Sizes:
        """All sizes of a source, or those of samples from all over the data set that answered in time."""
        if isinstance(source.read, torch.Tensor):
            return Sizes(source.names, source.read)
        asked: dict[int, Any] = {}
        failed = 0
        begun = shown = time.monotonic()
        itself = not source.names
        with self._at_most(_FOR_SIZES) as limit:
            for number in _spread(self._count):
                limit.check()
                try:
                    asked[number] = source.read(number)
                except Exception as error:  # noqa: BLE001 - the user's own data set
                    failed += 1
                    if failed == 1:
                        said = f"{type(error).__name__}: {error}"
                        self._remarks.append(_("sample {number} tells no size: {error}", number=number, error=said))
                now = time.monotonic()
                if now - shown > 1:
                    shown = now
                    self._progress(_("sizes of {known} of {count} samples", known=len(asked), count=self._count))
                if itself and now - begun > _FOR_ALIKE * self._question.seconds and self._alike():
                    break
        return _table(source.names, asked, self._count)

    def _borne_out(self, sizes: Sizes, source: Source) -> bool:
        """True unless one sample is smaller than another that is said to be larger in nothing."""
        known = sizes.known
        if len(known) == 0:
            return False
        order = known[sizes.values[known].clamp(min=1).double().prod(1).argsort()]
        numbers = order[torch.linspace(0, len(order) - 1, min(_CHECKED, len(order))).long()].tolist()
        with self._at_most(_FOR_ORDERS) as limit:
            for number in reversed(numbers):
                limit.check()
                self._extents(number)
        read = [number for number in numbers if number in self._read]
        for one, other in itertools.permutations(read, 2):
            said, less = sizes.values[one], sizes.values[other]
            more = bool((said >= less).all()) and bool((said > less).any())
            if more and self._read[one].amount < self._read[other].amount:
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


class _Read(NamedTuple):
    """Facts about a sample that was read."""

    shapes: tuple[Shape, ...]

    @property
    def without_texts(self) -> tuple[Shape, ...]:
        """Shapes of all but texts."""
        return tuple(one for one in self.shapes if not one.text)

    @property
    def amount(self) -> int:
        """Numbers and characters in it."""
        return sum(math.prod(one.extents) for one in self.shapes)


def _of_sampler(loader: Any, count: int) -> Source | None:
    """Samplers that group by length know it: Transformers' LengthGroupedSampler."""
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        column = column_of(getattr(sampler, "lengths", None), count)
        if column is not None and column.shape[1] == 1:
            return Source(("length",), column, _("the sampler"))
    return None


def _spread(count: int) -> Iterable[int]:
    """Numbers from all over, each once."""
    if count > _MOST_ASKED:
        return torch.linspace(0, count - 1, _MOST_ASKED, dtype=torch.float64).long().tolist()
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return order


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


# --- streams --------------------------------------------------------------------------------------------------


def _look_at_stream(question: Question) -> Found | None:
    """The largest of the first samples, of which any may come together: the rest is not known."""
    asked: dict[int, Any] = {}
    read: list[_Read] = []
    begun = time.monotonic()
    with at_most(_FOR_SIZES * question.seconds, interrupt=question.alone) as limit:
        for number, sample in enumerate(islice(copied(question.loader.dataset), _MOST_OF_STREAM)):
            read.append(_Read(tuple(shapes_of(sample))))
            asked[number] = by_name(read[-1].shapes)
            limit.check()
            alike = len({one.shapes for one in read[:1] + read[-_CHECKED:]}) == 1 and len(read) > 1
            if alike and time.monotonic() - begun > _FOR_ALIKE * question.seconds:
                break
    sizes = _table((), asked, len(asked)).distinct() if asked else Sizes((), torch.zeros(0, 0))
    if not sizes.names:
        return None
    pool = Pool(torch.arange(len(asked)), min(question.size, len(asked)))
    orders = Orders("drawn", pools=[pool], per_epoch=-(-len(asked) // question.size))
    source = Source((), _no_size, _("reading the stream"))
    chosen, looked_at = candidates(orders, sizes, question.quantile)
    return Found(
        tuple(tuple(batch.tolist()) for batch in chosen),
        tuple(question.size for _batch in chosen),
        tuple(_words(question, batch, orders, sizes, source, looked_at, stream=True) for batch in chosen),
        differ=len({one.without_texts for one in read}) > 1,
        sizes=kept_sizes(sizes.known, sizes.values[sizes.known]),
    )


def _no_size(_number: int) -> tuple[int, ...]:
    return ()


# --- words ----------------------------------------------------------------------------------------------------


def _words(
    question: Question,
    batch: torch.Tensor,
    orders: Orders,
    sizes: Sizes,
    source: Source,
    looked_at: int,
    *,
    stream: bool = False,
) -> str:
    """One line: what is planned for, how often it occurs, and what it was found by."""
    largest = sizes.values[batch].clamp(min=0).amax(0).tolist()
    names = [f"size{name}" if name[:1] in ("", "[") else name for name in sizes.names]
    named = ", ".join(f"{name} {size}" for name, size in zip(names, largest, strict=True))
    facts = {"samples": len(batch), "sizes": named}
    known, count, sampler = len(sizes.known), len(sizes.values), type(_sampler_of(question.loader)).__name__
    parts = []
    if question.quantile is None:
        parts.append(_("the longest batch is planned for: {samples} samples of up to {sizes}", **facts))
        if not stream:
            times = share_as_long(batch, orders, sizes)
            said = _(
                "at most {times} of {batches} batches of an epoch are so long", times=times, batches=orders.per_epoch
            )
            parts.append(said)
    else:
        parts.append(_("a long batch is planned for: {samples} samples of up to {sizes}", **facts))
        parts.append(
            _(
                "{share} of {count} batches are no longer, and longer ones are left to the recovery from out-of-memory "
                "errors",
                share=f"{100 * question.quantile:.4g}%",
                count=looked_at,
            )
        )
    if orders.kind == "bound":
        parts.append(_("a bound, for {sampler} draws at random", sampler=sampler))
    elif orders.kind == "drawn" and not stream:
        made = len(orders.made)
        parts.append(_("{sampler} made {count} batches, and may make others", sampler=sampler, count=made))
    if known < count or stream:
        parts.append(
            _(
                "{known} of {count} samples are known, by {source} for {seconds} s; longer ones among the others are "
                "not planned for",
                known=known,
                count=_("unknown many") if stream else count,
                source=source.words,
                seconds=f"{question.seconds:g}",
            )
        )
    else:
        parts.append(_("sizes of all {count} samples are known by {source}", count=count, source=source.words))
    return "; ".join(parts)


def _sampler_of(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", None) or loader.batch_sampler
