"""Sizes of samples: told by the sampler or a column of the data set, or those of samples that were read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from vram_guard.limits import PARTS_OF_A_SAMPLE
from vram_guard.state.containers import children

#: Attributes and columns that hold a size of every sample: fairseq's, Transformers', and those that people make.
COLUMNS = ("length", "lengths", "sizes", "num_tokens", "lens", "seq_lengths", "seq_lens", "heights", "widths")


@dataclass(frozen=True)
class Sizes:
    """Sizes of samples.

    Attributes:
        names: of the measures.
        values: samples x measures; -1 where it is not known.
    """

    names: tuple[str, ...]
    values: torch.Tensor

    @property
    def known(self) -> torch.Tensor:
        """Numbers of the samples whose sizes are known."""
        return (self.values >= 0).all(dim=1).nonzero().flatten()

    @property
    def areas(self) -> torch.Tensor:
        """Product of the measures of each sample."""
        return self.values.clamp(min=1).double().prod(1)

    def distinct(self) -> Sizes:
        """Without measures that are the same for all samples, or as another."""
        rows = self.values[self.known]
        kept: list[int] = []
        for k in range(len(self.names)):
            column = rows[:, k]
            if (column != column[:1]).any() and not any(torch.equal(column, rows[:, one]) for one in kept):
                kept.append(k)
        return Sizes(tuple(self.names[k] for k in kept), self.values[:, kept])


def told_sizes(loader: Any, count: int) -> Sizes | None:
    """Sizes of all samples, as the sampler or a column of the data set tells them; None where neither does.

    Args:
        loader: a DataLoader whose data set has an index.
        count: of its samples.
    """
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if (column := _column(getattr(sampler, "lengths", None), count)) is not None:
            return Sizes(("length",), column[:, None])  # Transformers' LengthGroupedSampler
    return _of_dataset(loader.dataset, count)


def _of_dataset(dataset: Any, count: int) -> Sizes | None:
    if isinstance(dataset, Subset):
        found = _of_dataset(dataset.dataset, len(dataset.dataset))  # type: ignore[arg-type]
        return None if found is None else Sizes(found.names, found.values[torch.as_tensor(dataset.indices)])
    columns = getattr(dataset, "column_names", ())  # of Hugging Face's data sets
    told = {name: dataset[name] if name in columns else getattr(dataset, name, None) for name in COLUMNS}
    found_columns = {name: column for name, value in told.items() if (column := _column(value, count)) is not None}
    return Sizes(tuple(found_columns), torch.stack([*found_columns.values()], 1)) if found_columns else None


def _column(value: Any, count: int) -> torch.Tensor | None:
    """A whole number for each of so many samples; None where the value holds none."""
    if callable(value) or isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
        return None
    if len(value) != count or count == 0:
        return None
    numbers = torch.as_tensor(value if hasattr(value, "dtype") else list(value))
    fits = (
        numbers.dim() == 1 and not numbers.is_complex() and numbers.dtype != torch.bool and bool((numbers >= 0).all())
    )
    return numbers.to(torch.int64) if fits else None


# --- samples that are read ----------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A part of a sample, and how large it is."""

    path: str
    extents: tuple[int, ...]
    text: bool = False
    """Characters: a collate function may make tokens of them."""


def shapes_of(sample: Any, path: str = "", *, parts: float = PARTS_OF_A_SAMPLE) -> Iterator[Shape]:
    """Every part of a sample, or a batch, that has a size: tensors, arrays, pictures, texts, lists of numbers.

    Args:
        sample: as the data set delivers it.
        path: of the sample.
        parts: of a list that are looked at one by one; of a longer one the first stands for all.
    """
    shape, size = getattr(sample, "shape", None), getattr(sample, "size", None)
    if isinstance(sample, (str, bytes)):
        yield Shape(path, (len(sample),), text=True)
    elif isinstance(shape, tuple) and all(isinstance(extent, int) for extent in shape):
        yield Shape(path, tuple(shape))
    elif hasattr(sample, "getbands") and isinstance(size, tuple):  # PIL's pictures
        yield Shape(path, (size[1], size[0]))
    elif isinstance(sample, list):
        yield Shape(path, (len(sample),))
        if sample and not isinstance(sample[0], Number):
            for number, item in enumerate(sample if len(sample) <= parts else sample[:1]):
                yield from shapes_of(item, f"{path}[{number}]", parts=parts)
    else:
        found = children(sample)
        if found is None and hasattr(sample, "metainfo") and callable(getattr(sample, "items", None)):
            found = dict(sample.items())  # MMEngine's data elements
        for name, part in (found or {}).items():
            yield from shapes_of(part, f"{path}.{name}" if path else str(name), parts=parts)


def table_of(read: dict[int, tuple[Shape, ...]], count: int) -> Sizes:
    """Every dimension of the samples that were read, by the number of the sample."""
    rows = {
        number: {
            one.path if len(one.extents) == 1 else f"{one.path}[{axis}]": extent
            for one in shapes
            for axis, extent in enumerate(one.extents)
        }
        for number, shapes in read.items()
    }
    names = tuple(dict.fromkeys(name for row in rows.values() for name in row))
    values = torch.full((count, len(names)), -1)
    if names:
        values[torch.tensor(list(rows))] = torch.tensor([[row.get(name, 0) for name in names] for row in rows.values()])
    return Sizes(names, values)
