"""A few samples of the user's own train dataloader, made into batches of any size.

The loader stays where it is: samples are read from the dataset itself with the loader's own ``collate_fn``, and
every random number generator is put back.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from vram_guard.apply import microbatch
from vram_guard.capture.apart import SampleSizes, arranged, elements, leaf_shapes
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import LARGEST_APART, SAMPLES_ALIKE, SAMPLES_READ
from vram_guard.state.containers import own_copy
from vram_guard.state.random_generators import random_state_kept


@dataclass(frozen=True)
class Sample:
    """Batches as the user's loader delivers them, of any size."""

    make: Callable[[int], Any]
    """batch size -> a batch of so many samples, on the CPU, as the loader's ``collate_fn`` makes it."""
    batch_size: int
    """Samples that the loader delivers at once, on one process."""
    dataset_size: int | None
    """Samples of the data set; None for streams."""
    loader: Any
    """The loader that was read."""
    distinct: Callable[[int], Any]
    """size -> a batch of so many samples, from all over the data set; call it in a copy of the process.

    All different where the data set has so many; where it has samples of different sizes, the first half of the batch
    has the largest, and the second half small ones, see :mod:`vram_guard.capture.apart`.
    """
    growable: str = ""
    """The reason for which the loader's batch size cannot be changed; "" where it can."""
    notes: tuple[str, ...] = ()
    parts: tuple[Reading, ...] = ()
    """The samples of each loader behind it, of those that deliver samples."""


def number_of_batches(loader: Any) -> int | None:
    """The batches that a loader delivers; None where it does not say, as streams do.

    Example:
        >>> number_of_batches(DataLoader([1.0] * 5, batch_size=2)), number_of_batches(iter([]))
        (3, None)
    """
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class Reading:
    """Samples of one loader, and the batches that its ``collate_fn`` makes of them.

    Args:
        loader: a DataLoader.
        samples: those that batches are made of.
        note: what is said of them.
        endless: the loader's sampler starts over when it has been through the data set.
    """

    def __init__(self, loader: Any, samples: list[Any], note: tuple[str, ...] = (), *, endless: bool = False) -> None:
        self.loader = loader
        self.note = note
        self.endless = endless
        self.samples = samples
        self.numbers: tuple[int, ...] = ()
        """Of the samples, where they were chosen."""
        self.sizes: SampleSizes | None = None
        """Of samples of the data set, where they were looked at and differ."""
        self.extremes: tuple[Any, ...] = ()
        """The largest and the smallest of the first samples, where these differ in size."""
        self._whole: tuple[microbatch.Layout, Any, int] | None = None

    def take(self, samples: list[Any], size: int = 0, numbers: tuple[int, ...] = ()) -> None:
        """From now on, make batches of these samples.

        Args:
            samples: the largest first; where there are fewer than asked for, they are repeated.
            size: samples of a batch as the loader makes it: smaller ones are cut from it, and padded as it is. 0: each
                is collated by itself, for samples are alike.
            numbers: of these samples, where they were chosen.
        """
        self.samples, self._whole, self.numbers = samples, None, numbers
        if not size:
            return
        try:
            layout = microbatch.probe_layout(self.make)
            whole = self.make(size)
            microbatch.first_samples(layout, whole, 1)
        except Exception:  # noqa: BLE001 - the user's own code makes the batches; who cuts them says what is wrong
            return
        self._whole = layout, whole, size

    def apart(self, count: int, spread: list[int], read: Callable[[list[int]], list[Any]]) -> Any:
        """A batch of so many samples that differ in size, see :attr:`Sample.distinct`.

        Args:
            count: of samples.
            spread: numbers of as many, from all over the data set.
            read: gives samples by their numbers.
        """
        numbers = spread if self.sizes is None else self.sizes.apart(count, spread)
        try:
            samples = read(numbers)
        except Exception:
            if numbers == spread:
                raise
            samples = read(spread)  # the smallest file may be a broken one
        # As they came out: a transform may have made them all alike, or other than what is known of them.
        return self.loader.collate_fn(arranged([*samples, *(() if self.sizes else self.extremes)], count))

    def make(self, size: int) -> Any:
        """A batch of so many samples, repeated where there are fewer."""
        if self._whole is not None and size < self._whole[2]:
            return microbatch.first_samples(self._whole[0], self._whole[1], size)
        with random_state_kept():
            few = len(self.samples)
            own = few if size <= LARGEST_APART else size
            samples = [own_copy(self.samples[index % few], arrays=index >= own) for index in range(size)]
            return self.loader.collate_fn(samples)  # which may write into them


def read_loader(loader: Any, *, endless: bool = False) -> Sample:
    """Samples from one loader. Call it inside :func:`random_state_kept`.

    Args:
        loader: a ``DataLoader``, or anything that is iterated over batch by batch.
        endless: its sampler starts over when it has been through the dataset: every batch is full.

    Raises:
        UnsupportedStepError: batches of a known size cannot be had without disturbing the training.
    """
    if not isinstance(loader, DataLoader):
        return _read_ready_batches(loader, loader)
    if loader.batch_sampler is None:
        return _read_ready_batches(loader, loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        return _read_stream(loader)
    return _read_map(loader, endless)


def _read_map(loader: Any, endless: bool) -> Sample:
    """A dataset with an index: its first samples, collated."""
    size, growable = _batch_size(loader)
    length = len(loader.dataset)
    # A loader around a batch sampler of its own, such as Accelerate's, says nothing of that one's drop_last.
    drops = bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))
    if length == 0 or (drops and length < size and not endless):
        raise UnsupportedStepError(
            _(
                "the train dataset has {length} samples, no whole batch of {size}: there is nothing to train on",
                length=length,
                size=size,
            )
        )
    samples, extremes, note = _representative(lambda index: loader.dataset[index], length, size)

    def distinct(count: int) -> Any:
        spread = [number * length // count for number in range(count)]
        return part.apart(count, spread, lambda numbers: [loader.dataset[number] for number in numbers])

    size = size if endless else min(size, length)
    part = Reading(loader, samples, note, endless=endless)
    part.extremes = extremes
    return Sample(part.make, size, length, loader, distinct, growable, note, (part,))


def _batch_size(loader: Any) -> tuple[int, str]:
    """The samples in a batch, and why that number cannot be changed ("" where it can)."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return size, ""
    kind = type(loader.batch_sampler).__name__
    first = next(iter(_drawing_alike(loader.batch_sampler)), None)
    if not first:
        raise UnsupportedStepError(_("the batch sampler {kind} delivers no batch", kind=kind))
    return len(first), _("the batch sampler {kind} has no batch_size that could be changed", kind=kind)


def _drawing_alike(sampler: Any) -> Any:
    """A copy that draws what the sampler is going to draw, from generators of its own."""
    clone = copy.copy(sampler)
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator):
            setattr(clone, name, torch.Generator(value.device).set_state(value.get_state()))
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            setattr(clone, name, copy.deepcopy(value))
    return clone


def _read_stream(loader: Any) -> Sample:
    """A stream: the first samples of a copy, so that the stream itself stays where it is."""
    size = int(loader.batch_size)
    stream = iter(copied(loader.dataset))
    few = list(islice(stream, SAMPLES_ALIKE))
    if not few:
        raise UnsupportedStepError(_("the train dataset is a stream that delivers no sample"))
    samples, extremes, note = _representative(_Appending(few, stream), sys.maxsize, size)

    def distinct(count: int) -> Any:
        def read(numbers: list[int]) -> list[Any]:
            first = list(islice(iter(copied(loader.dataset)), max(numbers) + 1))
            return [first[number] for number in numbers if number < len(first)]

        return part.apart(count, list(range(count)), read)

    part = Reading(loader, samples, note)
    part.extremes = extremes
    return Sample(part.make, size, None, loader, distinct, "", note, (part,))


class _Appending:
    """Samples of a stream by index; the last one again where the stream has ended."""

    def __init__(self, seen: list[Any], stream: Iterator[Any]) -> None:
        self._seen, self._stream = seen, stream

    def __call__(self, index: int) -> Any:
        while len(self._seen) <= index:
            self._seen.append(next(self._stream, self._seen[-1]))
        return self._seen[index]


def copied(dataset: Any) -> Any:
    """A copy whose iteration does not move the original; its arrays are shared, for they are only read.

    Raises:
        UnsupportedStepError: the stream cannot be copied and would be used up by looking at it.
    """
    arrays = [value for value in vars(dataset).values() if hasattr(value, "dtype") and hasattr(value, "shape")]
    try:
        return copy.deepcopy(dataset, {id(array): array for array in arrays})
    except Exception as error:
        raise UnsupportedStepError(
            _(
                "the stream {kind} cannot be copied ({error}), and reading from it would take samples away from the "
                "training; keep open files and generators out of its attributes (open them in __iter__)",
                kind=type(dataset).__name__,
                error=f"{type(error).__name__}: {error}",
            )
        ) from error


def _representative(
    get: Callable[[int], Any], length: int, batch_size: int
) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    """A few samples; where they differ in size, the largest of a batch's worth instead, and the smallest beside it."""
    samples = [get(index) for index in range(min(SAMPLES_ALIKE, batch_size, length))]
    if len({leaf_shapes(sample) for sample in samples}) == 1:
        return samples, (), ()
    looked_at = min(SAMPLES_READ, batch_size, length)
    samples += [get(index) for index in range(len(samples), looked_at)]
    largest, smallest = max(samples, key=elements), min(samples, key=elements)
    note = _(
        "samples differ in size: the prediction takes the largest of the first {count} for every sample",
        count=looked_at,
    )
    return [largest], (largest, smallest), (note,)


def _read_ready_batches(loader: Any, source: Any) -> Sample:
    """A loader of whole batches: one of them, its samples repeated or left out for other sizes."""
    from vram_guard.simulate.tracing.batches import resized

    if isinstance(source, IterableDataset):
        source = copied(source)
    if isinstance(loader, DataLoader) and not isinstance(source, IterableDataset):
        batch = loader.collate_fn(source[0])
    else:
        batches = iter(source)
        if batches is source:
            raise UnsupportedStepError(
                _(
                    "the train dataloader is a {kind} that can be read only once; give a loader that starts anew at "
                    "every iter()",
                    kind=type(source).__name__,
                )
            )
        batch = next(batches)
        batch = loader.collate_fn(batch) if isinstance(loader, DataLoader) else batch
    size = microbatch.batch_size(batch)
    reason = _("the loader delivers ready batches (batch_size=None), whose size it does not decide")

    def make(count: int) -> Any:
        return own_copy(resized(batch, count))

    return Sample(make, size, None, loader, make, reason)


def set_batch_size(loader: Any, size: int) -> None:
    """Another batch size for a loader that exists already, which DataLoader's own ``__setattr__`` forbids."""
    loader.batch_sampler.batch_size = size
    vars(loader)["batch_size"] = size
