"""Places in which a sampler or a data set tells the sizes of its samples without making them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.longest._extents import extents_of

#: Attributes and columns that hold a size of every sample: fairseq's, Transformers', and those that people make.
COLUMNS = ("length", "lengths", "sizes", "num_tokens", "lens", "seq_lengths", "seq_lens", "heights", "widths")


class _UnusableError(VramGuardError):
    """Sizes that are not used, and why."""


@dataclass(frozen=True)
class SizeSource:
    """Sizes of samples, each with a name."""

    names: tuple[str, ...]
    read: torch.Tensor | Callable[[int], Any]
    """All of them (samples x names), or those of one sample, which takes time: in order, or by name."""
    words: str
    """The place, for people."""


def source_of(loader: Any, count: int, remarks: list[str]) -> SizeSource | None:
    """The first place that says something about each of the samples; None where there is none.

    Args:
        loader: a DataLoader whose data set has an index.
        count: of its samples.
        remarks: gets a line where sizes that somebody gave on purpose cannot be used.
    """
    try:
        for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
            column = _column(getattr(sampler, "lengths", None), count)  # Transformers' LengthGroupedSampler
            if column is not None and column.shape[1] == 1:
                return SizeSource(("length",), column, _("the sampler"))
        return _of_dataset(loader.dataset, count)
    except Exception as error:  # noqa: BLE001 - attributes of the user's own class
        said = str(error) if isinstance(error, _UnusableError) else f"{type(error).__name__}: {error}"
        remarks.append(_("sizes that the data set tells are not used: {why}", why=said))
        return None


def _of_dataset(dataset: Any, count: int) -> SizeSource | None:
    if isinstance(dataset, Subset):
        return _of_subset(dataset)
    if isinstance(dataset, ConcatDataset):
        return _in_a_row(dataset)
    for find in (_attributes, _arrow, _data_info, _held):
        found = find(dataset, count)
        if found is not None and found.names:
            return found
    return None


def _of_subset(dataset: Subset[Any]) -> SizeSource | None:
    found = _of_dataset(dataset.dataset, len(dataset.dataset))  # type: ignore[arg-type]
    if found is None:
        return None
    read, numbers = found.read, torch.as_tensor(dataset.indices)
    if isinstance(read, torch.Tensor):
        return SizeSource(found.names, read[numbers], found.words)
    return SizeSource(found.names, lambda number: read(int(numbers[number])), found.words)


def _in_a_row(dataset: ConcatDataset[Any]) -> SizeSource | None:
    """Several data sets one after the other, where each has a column of the same name."""
    found = [_of_dataset(one, len(one)) for one in dataset.datasets]  # type: ignore[arg-type]
    columns = [one.read for one in found if one is not None and isinstance(one.read, torch.Tensor)]
    names = {one.names for one in found if one is not None}
    if len(columns) < len(found) or len(names) != 1:
        return None
    words = ", ".join(dict.fromkeys(one.words for one in found if one is not None))
    return SizeSource(names.pop(), torch.cat(columns), words)


def _column(value: Any, count: int) -> torch.Tensor | None:
    """Whole numbers for each of so many samples, one or several for each; None where the value holds none.

    Raises:
        _UnusableError: one of them is negative.
    """
    if callable(value) or isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
        return None
    if len(value) != count or count == 0:
        return None
    numbers = torch.as_tensor(value if hasattr(value, "dtype") else list(value))
    if numbers.dim() not in (1, 2) or numbers.is_complex() or numbers.dtype == torch.bool:
        return None
    numbers = numbers.reshape(count, -1)
    wrong = (numbers < 0).any(dim=1) | (numbers != numbers).any(dim=1)  # noqa: PLR0124 - NaN
    if wrong.any():
        number = int(wrong.nonzero()[0])
        raise _UnusableError(_("sample {number} has {size}", number=number, size=numbers[number].tolist()))
    return numbers.to(torch.int64)


def _attributes(dataset: Any, count: int) -> SizeSource | None:
    found: dict[str, torch.Tensor] = {}
    for name in COLUMNS:
        if (column := _column(getattr(dataset, name, None), count)) is not None:
            wide = column.shape[1] > 1
            found |= {(f"{name}[{k}]" if wide else name): part for k, part in enumerate(column.unbind(1))}
    return SizeSource(tuple(found), torch.stack([*found.values()], 1), ", ".join(found)) if found else None


def _arrow(dataset: Any, count: int) -> SizeSource | None:
    """Columns of Hugging Face's data sets: lengths, or offsets of lists or texts, without their values."""
    table: Any = getattr(getattr(dataset, "data", None), "table", None)
    if not hasattr(table, "schema") or not hasattr(table, "column"):
        return None
    from pyarrow import compute, types

    kinds: list[dict[str, Any]] = [{}, {}, {}]
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        column = table.column(name)
        if types.is_integer(kind) and name in COLUMNS:
            kinds[0][name] = column
        elif types.is_list(kind) or types.is_large_list(kind):
            kinds[1][name] = compute.list_value_length(column)
        elif types.is_string(kind) or types.is_large_string(kind):
            kinds[2][name] = compute.binary_length(column)
    found = next(filter(None, kinds), None)
    if not found:
        return None
    columns = [torch.as_tensor(compute.fill_null(one, 0).to_numpy().copy()).to(torch.int64) for one in found.values()]
    numbers = torch.stack(columns, 1)
    rows = getattr(dataset, "_indices", None)  # after select, shuffle, filter
    if rows is not None:
        numbers = numbers[torch.as_tensor(rows.column(0).to_numpy().copy())]
    if len(numbers) != count:
        return None
    return SizeSource(tuple(found), numbers, _("columns {names}", names=", ".join(found)))


def _data_info(dataset: Any, _count: int) -> SizeSource | None:
    """MMEngine's data sets know height, width and boxes of a picture before it is read."""
    info = getattr(dataset, "get_data_info", None)
    if not callable(info):
        return None
    first = info(0)
    names = [name for name in ("height", "width", *COLUMNS) if isinstance(first.get(name), int)]
    lists = [name for name in ("instances", "gt_bboxes", "gt_labels") if hasattr(first.get(name), "__len__")][:1]

    def of(number: int) -> list[int]:
        found = info(number)
        return [*(int(found[name]) for name in names), *(len(found[name]) for name in lists)]

    return SizeSource((*names, *lists), of, "get_data_info")


def _held(dataset: Any, count: int) -> SizeSource | None:
    """Texts, tensors or lists of numbers that a list holds for every sample."""
    own = {"": dataset} if isinstance(dataset, list) else getattr(dataset, "__dict__", {})
    lists = {name: one for name, one in own.items() if isinstance(one, (list, tuple)) and len(one) == count > 0}
    found = {name: items for name, items in lists.items() if {"", "[0]"} & extents_of(items[0]).keys()}
    names = tuple(f"{name}{part}" for name, items in found.items() for part in extents_of(items[0]))

    def of(number: int) -> list[int]:
        return [extent for items in found.values() for extent in extents_of(items[number]).values()]

    return SizeSource(names, of, ", ".join(filter(None, found)) or _("the list")) if found else None
