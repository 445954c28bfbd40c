"""Extents of one sample, whatever it is made of: tensors, arrays, pictures, texts, lists of numbers."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vram_guard.limits import PARTS_OF_A_SAMPLE
from vram_guard.state.containers import children


class Shape(NamedTuple):
    """A part of a sample, and how large it is."""

    path: str
    extents: tuple[int, ...]
    text: bool = False
    """Characters: a collate function may make tokens of them."""


def shapes_of(sample: Any, path: str = "", *, parts: float = PARTS_OF_A_SAMPLE) -> Iterator[Shape]:
    """Every part of a sample, or a batch, that has a size.

    Args:
        sample: as the data set delivers it.
        path: of the sample.
        parts: of a list that are looked at one by one; of a longer one the first stands for all.

    Example:
        >>> for one in shapes_of({"image": torch.ones(3, 8, 6), "boxes": [[0, 0, 1, 1], [0, 0, 2, 2]], "id": 5}):
        ...     print(one.path, one.extents)
        image (3, 8, 6)
        boxes (2, 4)
    """
    if isinstance(sample, (str, bytes)):
        yield Shape(path, (len(sample),), text=True)
    elif (shape := _shape(sample)) is not None:
        yield Shape(path, shape)
    elif isinstance(sample, list):
        yield from _of_list(sample, path, parts)
    else:
        found = children(sample)
        if found is None and hasattr(sample, "metainfo") and callable(getattr(sample, "items", None)):
            found = dict(sample.items())  # MMEngine's data elements
        for name, part in (found or {}).items():
            yield from shapes_of(part, f"{path}.{name}" if path else str(name), parts=parts)


def extents_of(sample: Any) -> dict[str, int]:
    """Every dimension of a sample by its name."""
    return by_name(shapes_of(sample))


def by_name(shapes: Iterable[Shape]) -> dict[str, int]:
    """Every dimension of these parts by its name."""
    return {
        one.path if len(one.extents) == 1 else f"{one.path}[{axis}]": extent
        for one in shapes
        for axis, extent in enumerate(one.extents)
    }


def _shape(part: Any) -> tuple[int, ...] | None:
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple) and all(isinstance(extent, int) for extent in shape):
        return tuple(shape)
    size = getattr(part, "size", None)
    if hasattr(part, "getbands") and isinstance(size, tuple):  # PIL's pictures
        return (size[1], size[0])
    return None


def _of_list(part: list[Any], path: str, parts: float) -> Iterator[Shape]:
    if part and isinstance(part[0], list) and part[0] and isinstance(part[0][0], numbers.Number):
        yield Shape(path, (len(part), len(part[0])))
        return
    yield Shape(path, (len(part),))
    if part and not isinstance(part[0], numbers.Number):
        for number, item in enumerate(part if len(part) <= parts else part[:1]):
            yield from shapes_of(item, f"{path}[{number}]", parts=parts)
