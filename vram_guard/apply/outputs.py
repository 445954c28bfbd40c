"""Outputs of a model, whatever their structure: taken apart into tensors, put together from slices of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from vram_guard.apply.loss_weight import weighted_sum
from vram_guard.apply.microbatch import MicroBatch, is_array
from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.state.containers import children, mapped, rebuilt
from vram_guard.tensors import tensors_of


class Merging:
    """Outputs of the slices, put together as they come.

    Args:
        samples: of the whole batch.
        of_two: how many rows each tensor has that the model makes of two samples, 0 for numbers; needed for slices of
            one sample, of which a row and what there is once for a batch look alike. None: not known.
    """

    def __init__(self, samples: int, of_two: tuple[int, ...] | None = None) -> None:
        self._samples = samples
        self._of_two = of_two
        self._whole: list[torch.Tensor] = []
        self._rows: list[bool] = []
        self._like: Any = None

    def add(self, out: Any, first: int, samples: int, weight: Any) -> None:
        """One slice's output: rows to their place, scalars by their weight, of other things the latest."""
        tensors = tensors_of(out)
        if not self._whole:
            self._rows = [rows == samples for rows in rows_of(tensors)]
            if samples == 1 and self._of_two is not None:
                self._rows = [rows == 2 for rows in self._of_two]
            self._whole = [
                torch.empty((self._samples, *t.shape[1:]), dtype=t.dtype, device=t.device)
                if rows
                else torch.zeros_like(t)
                for t, rows in zip(tensors, self._rows, strict=True)
            ]
        self._like = _without_tensors(out)
        for whole, tensor, rows in zip(self._whole, tensors, self._rows, strict=True):
            if rows:
                whole[first : first + samples] = tensor
            elif tensor.is_floating_point() and tensor.dim() == 0:
                whole.add_(_share_of(tensor, weight))
            else:
                whole.copy_(tensor)

    def share(self, at: int, gradient: torch.Tensor, first: int, samples: int, weight: Any) -> torch.Tensor:
        """One slice's part of the whole output's gradient."""
        if self._rows[at]:
            return gradient[first : first + samples]
        part: torch.Tensor = gradient * weight  # it is the same in every slice, and gradients are summed over them
        return part

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the whole batch's output, once."""
        whole, self._whole = tuple(self._whole), []
        return whole

    def rebuilt(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """An output of the model's own kind that holds these tensors."""
        return _with_tensors(self._like, iter(tensors))


def rows_of(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Number of rows of each tensor; 0 for numbers."""
    return tuple(len(tensor) if tensor.dim() else 0 for tensor in tensors)


def check_rows(out: Any, samples: int, of_two: tuple[int, ...] | None = None) -> None:
    """Outputs that carry gradient can be put together again.

    Args:
        out: what a model returned for so many samples.
        samples: of the batch that it was given.
        of_two: see :class:`Merging`.

    Raises:
        UnsupportedTechniqueError: a tensor's rows are not the samples.
    """
    tensors = tensors_of(out)
    found, expected = rows_of(tensors), samples
    if samples == 1 and of_two is not None:
        found, expected = of_two, 2
        if len(found) != len(tensors):
            raise UnsupportedTechniqueError(
                _(
                    "the model returns {one} tensors for one sample and {two} for two: it cannot run in slices "
                    "of one sample",
                    one=len(tensors),
                    two=len(found),
                )
            )
    for tensor, rows in zip(tensors, found, strict=True):
        if tensor.requires_grad and rows not in (expected, 0, 1):
            raise UnsupportedTechniqueError(
                _(
                    "for {expected} samples the model returns a tensor of {rows} rows (of shape {shape} for "
                    "{samples}), so its rows are not the samples: it cannot run in slices of its batch",
                    expected=expected,
                    rows=rows,
                    shape=tuple(tensor.shape),
                    samples=samples,
                )
            )


def merged(
    outputs: Sequence[Any],
    parts: Sequence[MicroBatch],
    weights: Sequence[Any] | None = None,
    *,
    rows: bool = True,
    name: str = "",
) -> Any:
    """Outputs of micro-batches as they would have been returned for the whole batch.

    Mappings, tuples and data classes are merged part by part; a key that some micro-batches lack is merged over the
    others. Tensors and arrays with a row per sample are joined, and so are lists with an item per sample.
    Floating-point numbers become the mean over samples, and those whose name says that they are losses add up by
    their weights. Anything else that is the same in all micro-batches (text, an epoch's number) stays what it is.

    The rest cannot be known. Lists of the same length are merged item by item, whole numbers that differ, or that are
    the numbers of samples, are taken for counts and added up, and of other things the last micro-batch's is taken; the
    latter two with a warning.

    Args:
        outputs: of the micro-batches, without graphs.
        parts: the micro-batches.
        weights: what their losses were multiplied with; None: as means over samples.
        rows: whether tensors may have a row per sample; where not, tensors of all shapes are numbers.
        name: of the value in a mapping.

    Example:
        >>> halves = [MicroBatch(None, 3, 4), MicroBatch(None, 1, 4)]
        >>> merged([{"ids": ["a", "b", "c"], "error": 1.0}, {"ids": ["d"], "error": 5.0}], halves)
        {'ids': ['a', 'b', 'c', 'd'], 'error': 2.0}
    """
    return _Merge(parts, weights, rows).whole(outputs, name)


@dataclass(frozen=True)
class _Merge:
    """One call of :func:`merged`."""

    parts: Sequence[MicroBatch]
    weights: Sequence[Any] | None
    rows: bool

    def whole(self, outputs: Sequence[Any], name: str) -> Any:
        """The whole batch's output."""
        if len(outputs) == 1 or all(output is None for output in outputs):
            return outputs[0]
        if all(isinstance(output, list) for output in outputs):
            return self._of_lists(outputs, name)
        pieces = [children(output) for output in outputs]
        if all(isinstance(output, Mapping) for output in outputs) or _same_keys(pieces):
            return self._of_pieces(outputs, pieces, name)
        if all(isinstance(output, torch.Tensor) for output in outputs):
            if self.rows and _have_rows(outputs, self.parts):
                return torch.cat(list(outputs))
            if all(output.is_floating_point() and not (self.rows and output.ndim) for output in outputs):
                return weighted_sum(outputs, self._shares(name))
        elif all(isinstance(output, Real) and not isinstance(output, Integral) for output in outputs):
            return sum(output * float(share) for output, share in zip(outputs, self._shares(name), strict=True))
        elif all(is_array(output) and output.dtype.kind in "biuf" for output in outputs):
            joined = self.whole([torch.tensor(output) for output in outputs], name)
            return joined.numpy() if isinstance(joined, torch.Tensor) else joined
        return self._unknown(outputs, name)

    def _of_pieces(self, outputs: Sequence[Any], pieces: Sequence[Any], name: str) -> Any:
        """Containers of one kind, key by key."""
        whole = {}
        for key in dict.fromkeys(key for piece in pieces for key in piece):
            having = [at for at, piece in enumerate(pieces) if key in piece]
            weights = None if self.weights is None else [self.weights[at] for at in having]
            those = replace(self, parts=[self.parts[at] for at in having], weights=weights)
            whole[key] = those.whole([pieces[at][key] for at in having], key if isinstance(key, str) else name)
        return whole if type(outputs[-1]) is dict else rebuilt(outputs[-1], whole)

    def _of_lists(self, outputs: Sequence[list[Any]], name: str) -> Any:
        """Lists of samples, or of further outputs."""
        alike = len({len(output) for output in outputs}) == 1
        columns = list(zip(*outputs, strict=True)) if alike else []
        of_tensors = bool(columns) and all(_have_rows(column, self.parts) for column in columns)
        if not of_tensors and all(len(out) == part.samples for out, part in zip(outputs, self.parts, strict=True)):
            return [item for output in outputs for item in output]
        return [self.whole(column, name) for column in columns] if columns else self._unknown(outputs, name)

    def _unknown(self, outputs: Sequence[Any], name: str) -> Any:
        """Outputs that are neither rows nor fractions nor containers of them."""
        numbers = [out.item() if isinstance(out, torch.Tensor) and not out.ndim else out for out in outputs]
        counts = all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)
        if _equal(outputs) and not (counts and numbers == [part.samples for part in self.parts]):
            return outputs[-1]
        said = _(
            "{name} of what the step returns ({kind}) cannot be put together from micro-batches for certain: {taken}",
            name=name or _("a part"),
            kind=type(outputs[-1]).__name__,
            taken=_("their sum is taken") if counts else _("the last one's is taken"),
        )
        warnings.warn(f"vram_guard: {said}", stacklevel=2)
        return sum(outputs) if counts else outputs[-1]

    def _shares(self, name: str) -> list[Any]:
        """The weights of numbers of this name: of losses those of the losses, of others shares of the samples."""
        if self.weights is not None and "loss" in name:
            return list(self.weights)
        samples = sum(part.samples for part in self.parts)
        return [part.samples / samples for part in self.parts]


def _have_rows(outputs: Sequence[Any], parts: Sequence[MicroBatch]) -> bool:
    return all(
        isinstance(output, torch.Tensor) and output.ndim and len(output) == part.samples
        for output, part in zip(outputs, parts, strict=True)
    )


def _same_keys(pieces: Sequence[dict[Any, Any] | None]) -> bool:
    first = pieces[0]
    return first is not None and all(piece is not None and piece.keys() == first.keys() for piece in pieces)


def _equal(outputs: Sequence[Any]) -> bool:
    """True if all are the same; things that cannot be compared are not."""
    try:
        return all(
            other is outputs[-1]
            or (torch.equal(other, outputs[-1]) if isinstance(other, torch.Tensor) else bool(other == outputs[-1]))
            for other in outputs[:-1]
        )
    except Exception:  # noqa: BLE001 - objects of the user's
        return False


def _share_of(value: torch.Tensor, weight: Any) -> torch.Tensor:
    """A slice's part of a weighted mean; a slice of no weight has none, even where its own mean is undefined."""
    part: torch.Tensor = value * weight
    return torch.where(weight == 0, torch.zeros_like(part), part) if isinstance(weight, torch.Tensor) else part


# --- structures of outputs ----------------------------------------------------------------------------------

_TENSOR = object()


def detached(out: Any) -> Any:
    """The same output without its graph, which would keep its activations alive."""
    return mapped(out, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _without_tensors(out: Any) -> Any:
    return mapped(out, lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf)


def _with_tensors(like: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return mapped(like, lambda leaf: next(tensors) if leaf is _TENSOR else leaf)
