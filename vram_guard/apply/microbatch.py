"""Split one loaded batch into micro-batches, without copying its tensors.

A batch is whatever a data loader hands out: tensors, numpy arrays, mappings, lists, tuples, named tuples,
data classes, lists of samples, in any nesting. Every tensor of it is expected to hold the samples along its
first dimension. Where that cannot be told apart from something else, the split is refused by name of the
part, never guessed.
"""

from __future__ import annotations

import datetime as dt
import enum
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.state.containers import children, rebuilt
from vram_guard.step import checked_count

#: Sizes at which batches are looked at; the first five are seldom those of anything but a batch, the even ones are
#: for loaders that make no others.
_PROBED_SIZES = (5, 7, 11, 13, 17, 10, 14, 22)

_PLAIN = (str, bytes, numbers.Number, enum.Enum, type(None), dt.date, dt.timedelta, type)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.Size)


class CannotSplitError(UnsupportedStepError):
    """A batch cannot be cut along its samples; ``path`` names the part that prevents it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(_("cannot split the batch into micro-batches: {path}: {reason}", path=path, reason=reason))
        self.path = path
        self.reason = reason


class MicroBatch(NamedTuple):
    """Some consecutive samples of a batch."""

    data: Any
    """The same structure as the batch; its tensors and arrays are views."""
    samples: int
    batch_samples: int

    @property
    def weight(self) -> float:
        """The share of the batch.

        A loss that is a mean over samples is multiplied with it, so that gradients add up to the batch's.
        """
        return self.samples / self.batch_samples


@dataclass(frozen=True)
class Layout:
    """Way to cut one part of a batch: by rows, part by part, or not at all.

    Attributes:
        rows: cut along its first dimension (tensor, array), or by its items (a list of samples).
        parts: of a container whose parts are cut one by one, by key, index or field. A layout with neither is given
            whole to every micro-batch: scalars, strings, None, tensors that broadcast over the batch.
    """

    rows: bool = False
    parts: dict[Any, Layout] | None = None

    @property
    def has_rows(self) -> bool:
        """True where anything is cut."""
        return self.rows or any(child.has_rows for child in (self.parts or {}).values())


_SHARED, _ROWS = Layout(), Layout(rows=True)


def batch_size(batch: Any) -> int:
    """The number of samples of a batch of unknown size.

    The leading size that all tensors share counts; without tensors, the length of its lists. A bare list of
    equally large tensors reads as a list of columns, not of samples: say the size to :func:`split` there.

    Raises:
        CannotSplitError: when no single size explains the batch; the message names the sizes found.
    """
    rows = _leading_sizes(batch)
    sizes = set(rows.values()) - {1} or set(rows.values())
    if not sizes:
        sizes = {len(items) for items in _lists(batch).values()}
    if len(sizes) == 1 and _can_read(batch, *sizes):
        return sizes.pop()
    # Lists of samples: the tensors' common leading size is that of their channels.
    readable = [size for size in {len(items) for items in _lists(batch).values()} if _can_read(batch, size)]
    if len(readable) == 1:
        return readable[0]
    if len(sizes) == 1:
        read_layout(batch, *sizes)  # its error says what prevents it
    found = ", ".join(_("{path} has {size}", path=path, size=size) for path, size in list(rows.items())[:4])
    raise CannotSplitError(
        "batch",
        _("its parts do not agree on the number of samples ({found})", found=found or _("no tensor, no list")),
    )


def split(batch: Any, batch_size: int, micro_batch_size: int) -> list[MicroBatch]:
    """Cut a batch of ``batch_size`` samples into equally large micro-batches of at most ``micro_batch_size``.

    The sizes differ by one sample at most, the larger first; their sum is ``batch_size``.

    Raises:
        InvalidInputError: for sizes that are not positive ints.
        CannotSplitError: when a part of the batch does not hold ``batch_size`` samples.
    """
    checked_count("batch_size", batch_size)
    most = checked_count("micro_batch_size", micro_batch_size)
    return _cut(read_layout(batch, batch_size), batch, even_sizes(batch_size, most))


class Splitter:
    """Cuts batch after batch of one loader; a full batch teaches it how to read a short one.

    (A pair of tensors with two samples each and a list of two samples look alike; a full batch before it
    settles which of the two the loader makes.)
    """

    def __init__(
        self, batch_size: int, micro_batch_size: int, example: Any = None, *, layout: Layout | None = None
    ) -> None:
        """``batch_size``: samples of a full batch; ``example``: a full batch; ``layout``: how batches are read.

        Raises:
            CannotSplitError: when the example cannot be cut.
        """
        self.batch_size = checked_count("batch_size", batch_size)
        self.micro_batch_size = checked_count("micro_batch_size", micro_batch_size)
        self.layout = layout
        if example is not None:
            self.layout = read_layout(example, self.batch_size)

    def split(self, batch: Any, parts: int | None = None) -> list[MicroBatch]:
        """The micro-batches of one batch, full or short (see :func:`split`); ``parts`` of them where that is given."""
        layout, size = self._understand(batch)
        return _cut(layout, batch, even_sizes(size, self.micro_batch_size) if parts is None else in_parts(size, parts))

    def count(self, batch: Any) -> int:
        """The samples of a batch.

        Raises:
            CannotSplitError: when it cannot be cut.
        """
        return self._understand(batch)[1]

    def _understand(self, batch: Any) -> tuple[Layout, int]:
        if self.layout is None and _can_read(batch, self.batch_size):
            self.layout = _unambiguous(batch, self.batch_size)
        if self.layout is not None:
            try:
                return self.layout, _size_of(self.layout, batch)
            except _OtherStructureError:
                pass
        size = batch_size(batch)
        return _unambiguous(batch, size), size


def splitter_of(make: Callable[[int], Any], batch_size: int, micro_batch_size: int) -> Splitter:
    """The splitter of a loader's batches; see :func:`probe_layout` for what is given and raised."""
    return Splitter(batch_size, micro_batch_size, layout=probe_layout(make))


def probe_layout(make: Callable[[int], Any]) -> Layout:
    """Layout of a loader's batches, read from two of them.

    A list of three images of three channels reads as three samples or as three columns of three samples each. At
    sizes that nothing else in the batch happens to have, there is one reading, and two sizes agree on it.

    Args:
        make: batch size -> a batch of the loader; sizes at which it fails are passed over.

    Raises:
        CannotSplitError: the batches cannot be cut.
        UnsupportedStepError: no batch can be made.
    """
    readings: list[Layout] = []
    failure: Exception | None = None
    for size in _PROBED_SIZES:
        try:
            example = make(size)
        except Exception as error:  # noqa: BLE001 - the user's collate_fn, at a size that the training may never ask for
            failure = failure or error
            continue
        layout = read_layout(example, size)
        if layout in readings:
            return layout
        readings.append(layout)
    if failure is not None:
        raise UnsupportedStepError(
            _("batches of other sizes cannot be made: {error}", error=f"{type(failure).__name__}: {failure}")
        ) from failure
    raise CannotSplitError("batch", _("which of its parts hold the samples differs from batch size to batch size"))


def read_layout(batch: Any, size: int) -> Layout:
    """Layout of a batch of ``size`` samples.

    Raises:
        CannotSplitError: a part of it does not hold so many samples, or none does.
    """
    layout = _read_part(batch, size, "batch")
    if not layout.has_rows:
        raise CannotSplitError("batch", _("no part of it holds {size} samples along its first dimension", size=size))
    return layout


def first_samples(layout: Layout, batch: Any, count: int) -> Any:
    """The first samples of a batch of a known layout."""
    return _take(layout, batch, 0, count)


class _OtherStructureError(Exception):
    """A batch does not have the structure that a layout was read from."""


def even_sizes(total: int, most: int) -> list[int]:
    """``total`` in the fewest parts of at most ``most``, as equal as possible, the larger first."""
    return in_parts(total, -(-total // most))


def in_parts(total: int, count: int) -> list[int]:
    """``total`` in so many parts, as equal as possible, the larger first."""
    small, larger = divmod(total, count)
    return [small + 1] * larger + [small] * (count - larger)


def _cut(layout: Layout, batch: Any, sizes: list[int]) -> list[MicroBatch]:
    micro_batches, start = [], 0
    for samples in sizes:
        micro_batches.append(MicroBatch(_take(layout, batch, start, samples), samples, sum(sizes)))
        start += samples
    return micro_batches


def _unambiguous(batch: Any, size: int) -> Layout:
    """The layout, where no other batch determines it: a list that reads in two ways is refused."""
    layout = read_layout(batch, size)
    for path, part in _lists(batch).items():
        alike = {(leaf.dtype, leaf.ndim) if _is_tensor(leaf) and leaf.ndim > 1 else None for leaf in part}
        if len(part) == size > 1 and len(alike) == 1 and None not in alike and {len(leaf) for leaf in part} == {size}:
            raise CannotSplitError(
                path,
                _("its {size} tensors of {size} rows each may be samples or columns of samples", size=size),
            )
    return layout


def _can_read(batch: Any, size: int) -> bool:
    try:
        read_layout(batch, size)
    except CannotSplitError:
        return False
    return True


def _read_part(part: Any, size: int, path: str) -> Layout:
    """Layout of one part, if the batch has ``size`` samples."""
    if _is_tensor(part) or is_array(part):
        return _read_rows(part, size, path)
    if _is_plain(part):
        return _SHARED
    if isinstance(part, PackedSequence):
        raise CannotSplitError(path, _("a packed sequence mixes its samples; pack it inside training_step"))
    parts = children(part)
    if parts is None:
        kind = type(part).__qualname__
        raise CannotSplitError(path, _("a {kind} has no samples that could be told apart", kind=kind))
    if not (isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and len(part) == size):
        return _read_children(parts, size, path)
    try:  # as many items as samples: columns if each can be read as one, else a list of samples
        columns = _read_children(parts, size, path)
    except CannotSplitError:
        return _ROWS
    return columns if columns.has_rows else _ROWS


def _read_rows(part: Any, size: int, path: str) -> Layout:
    if _is_tensor(part) and (part.is_nested or part.layout is not torch.strided):
        raise CannotSplitError(path, _("nested and sparse tensors cannot be cut into views"))
    if part.ndim == 0 or part.shape[0] == 1 != size:
        return _SHARED  # one row broadcasts over the batch, whatever its size
    if part.shape[0] == size:
        return _ROWS
    shape = tuple(part.shape)
    raise CannotSplitError(
        path,
        _(
            "shape {shape} starts with {found}, not with the {size} samples of the batch",
            shape=shape,
            found=shape[0],
            size=size,
        ),
    )


def _read_children(parts: dict[Any, Any], size: int, path: str) -> Layout:
    layouts = {key: _read_part(child, size, f"{path}[{key!r}]") for key, child in parts.items()}
    return Layout(parts=layouts) if any(layout != _SHARED for layout in layouts.values()) else _SHARED


def _size_of(layout: Layout, batch: Any) -> int:
    """The samples of a batch with a known layout.

    Raises:
        _OtherStructureError: when its containers are not those of the layout.
        CannotSplitError: when its parts do not agree.
    """
    sizes = dict(_row_counts(layout, batch, "batch"))
    one, first = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != first:
            raise CannotSplitError(
                path, _("{size} samples, where {other} has {others}", size=size, other=one, others=first)
            )
    return first


def _row_counts(layout: Layout, part: Any, path: str) -> Iterator[tuple[str, int]]:
    if layout.rows:
        if (_is_tensor(part) or is_array(part)) and part.ndim > 0:
            yield path, int(part.shape[0])
        elif isinstance(part, (list, tuple)):
            yield path, len(part)
        else:
            raise _OtherStructureError
    elif layout.parts is not None:
        parts = children(part)
        if parts is None or parts.keys() != layout.parts.keys():
            raise _OtherStructureError
        for key, child in layout.parts.items():
            yield from _row_counts(child, parts[key], f"{path}[{key!r}]")


def _take(layout: Layout, part: Any, start: int, length: int) -> Any:
    if layout.rows:
        return part.narrow(0, start, length) if _is_tensor(part) else part[start : start + length]
    if layout.parts is None:
        return part
    parts = children(part) or {}
    return rebuilt(part, {key: _take(layout.parts[key], child, start, length) for key, child in parts.items()})


def _leading_sizes(batch: Any) -> dict[str, int]:
    arrays = ((path, part) for path, part in _parts(batch, "batch") if _is_tensor(part) or is_array(part))
    return {path: int(part.shape[0]) for path, part in arrays if part.ndim > 0}


def _lists(batch: Any) -> dict[str, Any]:
    sequences = ((path, part) for path, part in _parts(batch, "batch") if isinstance(part, (list, tuple)) and part)
    return {path: part for path, part in sequences if not hasattr(part, "_fields")}


def _parts(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A part and all parts of it, containers too."""
    yield path, part
    for key, child in ({} if _is_plain(part) else children(part) or {}).items():
        yield from _parts(child, f"{path}[{key!r}]")


def _is_plain(part: Any) -> bool:
    return isinstance(part, (*_PLAIN, *_PLAIN_OF_TORCH)) or callable(part)


def _is_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor)


def is_array(part: Any) -> bool:
    """A numpy array, without importing numpy for it."""
    return type(part).__module__ == "numpy" and hasattr(part, "ndim") and hasattr(part, "dtype")
