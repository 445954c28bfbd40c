"""Split one loaded batch into micro-batches, without copying its tensors.

A batch is whatever a data loader hands out: tensors, numpy arrays, mappings, lists, tuples, named tuples,
data classes, lists of samples, in any nesting. Every tensor of it is expected to hold the samples along its
first dimension. Where that cannot be told apart from something else, the split is refused by name of the
part, never guessed.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from vram_guard.errors import UnsupportedStepError
from vram_guard.step import checked_count


class CannotSplitError(UnsupportedStepError):
    """A batch cannot be cut along its samples; ``path`` names the part that stands in the way."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot split the batch into micro-batches: {path}: {reason}")
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


class _Leaf(enum.Enum):
    """What becomes of a part that is no container."""

    SHARED = "given whole to every micro-batch: scalars, strings, None, tensors that broadcast over the batch"
    ROWS = "cut along its first dimension (tensor, array), or by its items (a list of samples)"


@dataclass(frozen=True)
class _Parts:
    """A container whose parts are cut one by one."""

    children: dict[Any, _Layout]


_Layout: TypeAlias = "_Leaf | _Parts"
_PLAIN = (str, bytes, numbers.Number, enum.Enum, type(None), dt.date, dt.timedelta, type)


def batch_size(batch: Any) -> int:
    """The number of samples of a batch whose size nobody said.

    The leading size that all tensors share counts; without tensors, the length of its lists. A bare list of
    equally large tensors reads as a list of columns, not of samples: say the size to :func:`split` there.

    Raises:
        CannotSplitError: when no single size explains the batch; the message names the sizes found.
    """
    rows = dict(_leading_sizes(batch, "batch"))
    sizes = set(rows.values()) - {1} or set(rows.values())
    if not sizes:
        sizes = {len(items) for items in _lists(batch)}
    if len(sizes) == 1 and _can_read(batch, *sizes):
        return sizes.pop()
    # Lists of samples: the tensors' common leading size is that of their channels.
    readable = [size for size in {len(items) for items in _lists(batch)} if _can_read(batch, size)]
    if len(readable) == 1:
        return readable[0]
    if len(sizes) == 1:
        _read(batch, *sizes)  # says what stands in the way
    found = ", ".join(f"{path} has {size}" for path, size in list(rows.items())[:4]) or "no tensor, no list"
    raise CannotSplitError("batch", f"its parts do not agree on the number of samples ({found})")


def split(batch: Any, batch_size: int, micro_batch_size: int) -> list[MicroBatch]:
    """Cut a batch of ``batch_size`` samples into equally large micro-batches of at most ``micro_batch_size``.

    The sizes differ by one sample at most, the larger first; their sum is ``batch_size``.

    Raises:
        InvalidInputError: for sizes that are no positive ints.
        CannotSplitError: when a part of the batch does not hold ``batch_size`` samples.
    """
    checked_count("batch_size", batch_size)
    most = checked_count("micro_batch_size", micro_batch_size)
    return _cut(_read(batch, batch_size), batch, batch_size, most)


class Splitter:
    """Cuts batch after batch of one loader; a full batch teaches it how to read a short one.

    (A pair of tensors with two samples each and a list of two samples look alike; a full batch before it
    settles which of the two the loader makes.)
    """

    def __init__(self, batch_size: int, micro_batch_size: int, example: Any = None, examples_size: int = 0) -> None:
        """``batch_size``: samples of a full batch; ``example``: a full batch, or one of ``examples_size``.

        Raises:
            CannotSplitError: when the example cannot be cut.
        """
        self.batch_size = checked_count("batch_size", batch_size)
        self.micro_batch_size = checked_count("micro_batch_size", micro_batch_size)
        self._layout = None if example is None else _read(example, examples_size or self.batch_size)

    def split(self, batch: Any) -> list[MicroBatch]:
        """The micro-batches of one batch, full or short (see :func:`split`)."""
        layout, size = self._understand(batch)
        return _cut(layout, batch, size, self.micro_batch_size)

    def _understand(self, batch: Any) -> tuple[_Layout, int]:
        if self._layout is None and _can_read(batch, self.batch_size):
            self._layout = _read(batch, self.batch_size)
        if self._layout is not None:
            try:
                return self._layout, _size_of(self._layout, batch)
            except _OtherStructureError:
                pass
        size = batch_size(batch)
        return _read(batch, size), size


def probe_layout(make: Callable[[int], Any]) -> tuple[Any, int]:
    """A batch from which a :class:`Splitter` learns the loader's structure, and its size.

    A list of three images of three channels reads as three samples or as three columns of three samples each. At
    sizes that nothing else in the batch happens to have, there is one reading, and two sizes agree on it.

    Args:
        make: batch size -> a batch of the loader.

    Raises:
        CannotSplitError: the batches cannot be cut.
    """
    readings: list[_Layout] = []
    for size in _TELLING_SIZES:
        example = make(size)
        layout = _read(example, size)
        if layout in readings:
            return example, size
        readings.append(layout)
    raise CannotSplitError("batch", "which of its parts hold the samples differs from batch size to batch size")


#: Sizes at which batches are looked at; seldom those of anything but a batch.
_TELLING_SIZES = (5, 7, 11, 13, 17)


class _OtherStructureError(Exception):
    """A batch does not have the structure that a layout was read from."""


def even_sizes(total: int, most: int) -> list[int]:
    """``total`` in the fewest parts of at most ``most``, as equal as possible, the larger first."""
    count = -(-total // most)
    small, larger = divmod(total, count)
    return [small + 1] * larger + [small] * (count - larger)


def _cut(layout: _Layout, batch: Any, size: int, most: int) -> list[MicroBatch]:
    micro_batches, start = [], 0
    for samples in even_sizes(size, most):
        micro_batches.append(MicroBatch(_take(layout, batch, start, samples), samples, size))
        start += samples
    return micro_batches


def _read(batch: Any, size: int) -> _Layout:
    layout = _read_part(batch, size, "batch")
    if not _has_rows(layout):
        raise CannotSplitError("batch", f"no part of it holds {size} samples along its first dimension")
    return layout


def _can_read(batch: Any, size: int) -> bool:
    try:
        _read(batch, size)
    except CannotSplitError:
        return False
    return True


def _read_part(part: Any, size: int, path: str) -> _Layout:
    """How one part is to be cut, if the batch has ``size`` samples."""
    if _is_tensor(part) or _is_array(part):
        return _read_rows(part, size, path)
    if _is_plain(part):
        return _Leaf.SHARED
    if type(part).__name__ == "PackedSequence":
        raise CannotSplitError(path, "a packed sequence mixes its samples; pack it inside training_step")
    children = _children(part)
    if children is None:
        raise CannotSplitError(path, f"a {type(part).__qualname__} has no samples that could be told apart")
    if not children:
        return _Leaf.SHARED
    if _may_be_samples(part, size):
        return _read_list(part, size, path)
    return _read_children(children, size, path)


def _read_rows(part: Any, size: int, path: str) -> _Layout:
    if _is_tensor(part) and (part.is_nested or part.layout is not _strided()):
        raise CannotSplitError(path, "nested and sparse tensors cannot be cut into views")
    if part.ndim == 0:
        return _Leaf.SHARED
    leading = int(part.shape[0])
    if leading == size:
        return _Leaf.ROWS
    if leading == 1:
        return _Leaf.SHARED  # broadcasts over the batch, whatever its size
    found = f"shape {tuple(part.shape)} starts with {leading}"
    raise CannotSplitError(path, f"{found}, not with the {size} samples of the batch")


def _may_be_samples(part: Any, size: int) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and len(part) == size


def _read_list(part: Any, size: int, path: str) -> _Layout:
    """As many items as samples: columns if each can be read as one, else a list of samples."""
    try:
        columns = _read_children(_children(part) or {}, size, path)
    except CannotSplitError:
        return _Leaf.ROWS
    return columns if _has_rows(columns) else _Leaf.ROWS


def _read_children(children: dict[Any, Any], size: int, path: str) -> _Layout:
    layouts = {key: _read_part(child, size, f"{path}[{key!r}]") for key, child in children.items()}
    return _Parts(layouts) if any(layout is not _Leaf.SHARED for layout in layouts.values()) else _Leaf.SHARED


def _has_rows(layout: _Layout) -> bool:
    if isinstance(layout, _Parts):
        return any(_has_rows(child) for child in layout.children.values())
    return layout is _Leaf.ROWS


def _size_of(layout: _Layout, batch: Any) -> int:
    """The samples of a batch with a known layout.

    Raises:
        _OtherStructureError: when its containers are not those of the layout.
        CannotSplitError: when its parts do not agree.
    """
    sizes = dict(_row_counts(layout, batch, "batch"))
    first = next(iter(sizes.values()))
    for path, size in sizes.items():
        if size != first:
            raise CannotSplitError(path, f"{size} samples, where {next(iter(sizes))} has {first}")
    return first


def _row_counts(layout: _Layout, part: Any, path: str) -> Iterator[tuple[str, int]]:
    if layout is _Leaf.ROWS:
        if (_is_tensor(part) or _is_array(part)) and part.ndim > 0:
            yield path, int(part.shape[0])
        elif isinstance(part, (list, tuple)):
            yield path, len(part)
        else:
            raise _OtherStructureError
    elif isinstance(layout, _Parts):
        children = _children(part)
        if children is None or children.keys() != layout.children.keys():
            raise _OtherStructureError
        for key, child in layout.children.items():
            yield from _row_counts(child, children[key], f"{path}[{key!r}]")


def _take(layout: _Layout, part: Any, start: int, length: int) -> Any:
    if layout is _Leaf.SHARED:
        return part
    if layout is _Leaf.ROWS:
        return part.narrow(0, start, length) if _is_tensor(part) else part[start : start + length]
    children = _children(part) or {}
    return _rebuild(part, {key: _take(layout.children[key], child, start, length) for key, child in children.items()})


def _children(part: Any) -> dict[Any, Any] | None:
    """The parts of a container by key, index or field; None where it is no container that can be rebuilt."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if isinstance(part, Mapping):
        return dict(part.items())
    if isinstance(part, (list, tuple)):
        return dict(enumerate(part))
    return None


def _rebuild(part: Any, children: dict[Any, Any]) -> Any:
    """The same container with other parts; a container's own type and further attributes are kept."""
    if isinstance(part, (list, tuple)):
        return type(part)(*children.values()) if hasattr(part, "_fields") else type(part)(children.values())
    if dataclasses.is_dataclass(part):
        if all(field.init for field in dataclasses.fields(part)):
            return dataclasses.replace(part, **children)  # type: ignore[type-var]
        clone = copy.copy(part)
        for name, child in children.items():
            object.__setattr__(clone, name, child)
        return clone
    clone = copy.copy(part)
    for key, child in children.items():
        clone[key] = child
    return clone


def _leading_sizes(part: Any, path: str) -> Iterator[tuple[str, int]]:
    if _is_tensor(part) or _is_array(part):
        if part.ndim > 0:
            yield path, int(part.shape[0])
    elif not _is_plain(part):
        for key, child in (_children(part) or {}).items():
            yield from _leading_sizes(child, f"{path}[{key!r}]")


def _lists(part: Any) -> Iterator[Any]:
    if isinstance(part, (list, tuple)) and part and not hasattr(part, "_fields"):
        yield part
    for child in ({} if _is_plain(part) else _children(part) or {}).values():
        yield from _lists(child)


def _is_plain(part: Any) -> bool:
    import torch

    return isinstance(part, (*_PLAIN, torch.dtype, torch.device, torch.Size)) or callable(part)


def _is_tensor(part: Any) -> bool:
    import torch

    return isinstance(part, torch.Tensor)


def _is_array(part: Any) -> bool:
    """A numpy array, without importing numpy for it."""
    return type(part).__module__ == "numpy" and hasattr(part, "ndim") and hasattr(part, "dtype")


def _strided() -> Any:
    import torch

    return torch.strided
