"""Places in which a data set tells the sizes of its samples without making them."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vram_guard.errors import VramGuardError
from vram_guard.language import _
from vram_guard.longest._extents import extents_of
from vram_guard.longest._headers import is_picture
from vram_guard.longest.file_sizes import FileSizes, PictureReader

#: Attributes that hold a size of every sample: fairseq's, Transformers', and those that people give them by themselves.
DECLARED = ("lengths", "sizes", "num_tokens", "lens", "seq_lengths", "seq_lens", "heights", "widths", "num_boxes")

#: Columns of tables that say how long a row is.
_LENGTHS = ("length", "lengths", "len", "num_tokens", "n_tokens", "token_count", "seq_len")


class _UnusableError(VramGuardError):
    """Sizes that are not used, and why."""


@dataclass(frozen=True)
class Source:
    """Sizes of samples, each with a name."""

    names: tuple[str, ...]
    read: torch.Tensor | Callable[[int], Any]
    """All of them (samples x names), or those of one sample, which takes time: in order, or by name."""
    words: str
    """The place, for people."""
    learned: Callable[[], FileSizes] | None = None
    """What is worth keeping for the next run."""


def source_of(dataset: Any, count: int, remarks: list[str]) -> Source | None:
    """The first of these places that says something about each of the samples; None where there is none.

    Args:
        dataset: with an index.
        count: of its samples.
        remarks: gets a line where sizes that somebody gave on purpose cannot be used.
    """
    for find in (_wrapped, _declared, _arrow, _data_info, _coco, _pictures, _held):
        try:
            found = find(dataset, count)
        except Exception as error:  # noqa: BLE001 - attributes of the user's own class
            said = str(error) if isinstance(error, _UnusableError) else f"{type(error).__name__}: {error}"
            remarks.append(_("sizes that the data set tells are not used: {why}", why=said))
            continue
        if found is not None and found.names:
            return found
    return None


def column_of(value: Any, count: int) -> torch.Tensor | None:
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


# --- wrappers -------------------------------------------------------------------------------------------------


def _wrapped(dataset: Any, count: int) -> Source | None:
    """A part of another data set, several of them in a row, or one of them several times."""
    several = getattr(dataset, "datasets", None)
    if isinstance(several, (list, tuple)) and several and sum(map(len, several)) == count:
        return _in_a_row(several)
    inner = getattr(dataset, "dataset", None)
    if inner is None or not hasattr(inner, "__len__"):
        return None
    numbers = getattr(dataset, "indices", None)
    if numbers is None:
        numbers = getattr(dataset, "repeat_indices", None)  # MMEngine's ClassBalancedDataset
    own = len(inner)
    if numbers is None and own and (own == count or getattr(dataset, "times", None) == count // own):
        numbers = torch.arange(count) % own  # one that changes samples, or MMEngine's RepeatDataset
    if numbers is None or len(numbers) != count:
        return None
    remarks: list[str] = []
    found = source_of(inner, own, remarks)
    if found is None and remarks:
        raise _UnusableError("; ".join(remarks))
    return None if found is None else _picked(found, torch.as_tensor(numbers))


def _picked(source: Source, numbers: torch.Tensor) -> Source:
    read = source.read
    if isinstance(read, torch.Tensor):
        return Source(source.names, read[numbers], source.words, source.learned)
    return Source(source.names, lambda number: read(int(numbers[number])), source.words, source.learned)


def _in_a_row(several: Sequence[Any]) -> Source | None:
    remarks: list[str] = []
    found = [source_of(one, len(one), remarks) for one in several]
    names = {one.names for one in found if one is not None}
    if None in found or len(names) != 1:
        return None
    reads = [one.read for one in found if one is not None]
    words = ", ".join(dict.fromkeys(one.words for one in found if one is not None))
    if all(isinstance(read, torch.Tensor) for read in reads):
        return Source(names.pop(), torch.cat([torch.as_tensor(read) for read in reads]), words)
    ends = torch.tensor([len(one) for one in several]).cumsum(0).tolist()

    def of(number: int) -> Sequence[int]:
        which = bisect.bisect_right(ends, number)
        read = reads[which]
        number -= ends[which - 1] if which else 0
        return read[number].tolist() if isinstance(read, torch.Tensor) else read(number)

    return Source(names.pop(), of, words)


# --- sizes that are there -------------------------------------------------------------------------------------


def _declared(dataset: Any, count: int) -> Source | None:
    """Attributes with a number for each sample."""
    found: dict[str, torch.Tensor] = {}
    for name in DECLARED:
        if (column := column_of(getattr(dataset, name, None), count)) is not None:
            wide = column.shape[1] > 1
            found |= {(f"{name}[{k}]" if wide else name): part for k, part in enumerate(column.unbind(1))}
    return Source(tuple(found), torch.stack([*found.values()], 1), ", ".join(found)) if found else None


class _Table(NamedTuple):
    """A table of Arrow's, and the rows of it that are the samples."""

    data: Any
    rows: torch.Tensor | None


def _arrow(dataset: Any, count: int) -> Source | None:
    """Columns of Hugging Face's data sets and of Arrow's tables: lengths, or offsets of lists, without their values."""
    if "pyarrow" not in sys.modules or (table := _table(dataset)) is None:
        return None
    from pyarrow import compute, types

    given: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for name, kind in zip(table.data.schema.names, table.data.schema.types, strict=True):
        column = table.data.column(name)
        if types.is_integer(kind) and name in (*_LENGTHS, "height", "width"):
            given[name] = column
        elif types.is_list(kind) or types.is_large_list(kind):
            lists[name] = compute.list_value_length(column)
        elif types.is_string(kind) or types.is_large_string(kind):
            texts[name] = compute.binary_length(column)
    found = given or lists or texts
    if not found:
        return None
    columns = []
    for column in found.values():
        numbers = torch.as_tensor(compute.fill_null(column, 0).to_numpy().copy()).to(torch.int64)
        columns.append(numbers if table.rows is None else numbers[table.rows])
    numbers = torch.stack(columns, 1)
    if len(numbers) != count:
        return None
    return Source(tuple(found), numbers, _("columns {names}", names=", ".join(found)))


def _table(dataset: Any) -> _Table | None:
    data = getattr(dataset, "data", dataset)
    data = getattr(data, "table", data)
    if not hasattr(data, "schema") or not hasattr(data, "column"):
        return None
    rows = getattr(dataset, "_indices", None)  # Hugging Face's: after select, shuffle, filter
    if rows is not None:
        rows = torch.as_tensor(rows.column(0).to_numpy().copy()).to(torch.int64)
    return _Table(data, rows)


def _data_info(dataset: Any, _count: int) -> Source | None:
    """MMEngine's data sets know height, width and boxes of a picture before it is read."""
    info = getattr(dataset, "get_data_info", None)
    if not callable(info):
        return None
    first = info(0)
    names = [name for name in ("height", "width", *_LENGTHS) if isinstance(first.get(name), int)]
    lists = [name for name in ("instances", "gt_bboxes", "gt_labels") if hasattr(first.get(name), "__len__")][:1]

    def of(number: int) -> list[int]:
        found = info(number)
        return [*(int(found[name]) for name in names), *(len(found[name]) for name in lists)]

    return Source((*names, *lists), of, "get_data_info")


def _coco(dataset: Any, count: int) -> Source | None:
    """Annotations as pycocotools has them."""
    coco, ids = getattr(dataset, "coco", None), getattr(dataset, "ids", None)
    images, boxes = getattr(coco, "imgs", None), getattr(coco, "imgToAnns", None)
    if not images or boxes is None or ids is None or len(ids) != count:
        return None
    rows = [(images[one]["height"], images[one]["width"], len(boxes.get(one, ()))) for one in ids]
    return Source(("height", "width", "boxes"), torch.tensor(rows), _("annotations"))


# --- sizes that have to be read -------------------------------------------------------------------------------


def _attributes(dataset: Any, count: int) -> dict[str, Any]:
    """Lists that have an item for every sample."""
    own = vars(dataset) if hasattr(dataset, "__dict__") else {}
    return {name: one for name, one in own.items() if isinstance(one, (list, tuple)) and len(one) == count > 0}


def _pictures(dataset: Any, count: int) -> Source | None:
    """Paths of pictures, as torchvision's ImageFolder has them (``samples``, ``imgs``) or in a list of any name."""
    for items in _attributes(dataset, count).values():
        place = next((k for k, one in enumerate(_tuple(items[0])) if is_picture(one)), None)
        if place is not None:
            paths = [str(_tuple(one)[place]) for one in items]
            if Path(paths[0]).is_file():
                reader = PictureReader(paths)
                return Source(("height", "width"), reader, _("heads of picture files"), reader.learned)
    return None


def _is_sized(item: Any) -> bool:
    return not is_picture(item) and bool({"", "[0]"} & extents_of(item).keys())


def _tuple(item: Any) -> tuple[Any, ...]:
    return tuple(item) if isinstance(item, (list, tuple)) else (item,)


def _held(dataset: Any, count: int) -> Source | None:
    """Texts, tensors or lists of numbers that an attribute holds for every sample."""
    found = {name: items for name, items in _attributes(dataset, count).items() if _is_sized(items[0])}
    names = tuple(f"{name}{part}" for name, items in found.items() for part in extents_of(items[0]))

    def of(number: int) -> list[int]:
        return [extent for items in found.values() for extent in extents_of(items[number]).values()]

    return Source(names, of, ", ".join(found)) if found else None
