"""Outputs of a model, whatever their structure: taken apart into tensors, put together from slices of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vram_guard.errors import UnsupportedTechniqueError


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
                torch.empty((self._samples, *t.shape[1:]), dtype=t.dtype, device=t.device) if rows else _empty_sum(t)
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
        """What of the whole output's gradient belongs to one slice."""
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
    """How many rows each tensor has; 0 for numbers."""
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
                f"of one sample the model makes {len(tensors)} tensors, of two {len(found)}: it cannot work in slices "
                "of one sample"
            )
    for tensor, rows in zip(tensors, found, strict=True):
        if tensor.requires_grad and rows not in (expected, 0, 1):
            raise UnsupportedTechniqueError(
                f"of {expected} samples the model makes a tensor of {rows} rows (of shape {tuple(tensor.shape)} for "
                f"{samples}), which are not the samples: it cannot work in slices of its batch"
            )


def _share_of(value: torch.Tensor, weight: Any) -> torch.Tensor:
    """A slice's part of a weighted mean; a slice of no weight has none, even where its own mean is undefined."""
    part: torch.Tensor = value * weight
    return torch.where(weight == 0, torch.zeros_like(part), part) if isinstance(weight, torch.Tensor) else part


def _empty_sum(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


# --- structures of outputs ----------------------------------------------------------------------------------

_TENSOR = object()


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [tensor for part in _parts(out) for tensor in tensors_of(part)]


def _parts(out: Any) -> list[Any]:
    if isinstance(out, Mapping):
        return list(out.values())
    if isinstance(out, (list, tuple)):
        return list(out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return [getattr(out, field.name) for field in dataclasses.fields(out)]
    return []


def _mapped(out: Any, function: Callable[[Any], Any]) -> Any:
    """The same kind of thing, with ``function`` applied to its parts."""
    if isinstance(out, Mapping):
        items = {key: function(value) for key, value in out.items()}
        if type(out) is dict:
            return items
        by_keywords = hasattr(out, "__dataclass_fields__")  # ModelOutput and its kin
        kind: Any = type(out)
        return kind(**items) if by_keywords else kind(items)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(function(part) for part in out))
    if isinstance(out, (list, tuple)):
        return type(out)(function(part) for part in out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return dataclasses.replace(out, **{f.name: function(getattr(out, f.name)) for f in dataclasses.fields(out)})
    return out


def _without_tensors(out: Any) -> Any:
    return _TENSOR if isinstance(out, torch.Tensor) else _mapped(out, _without_tensors)


def _with_tensors(like: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return next(tensors) if like is _TENSOR else _mapped(like, lambda part: _with_tensors(part, tensors))


def detached(out: Any) -> Any:
    """The same output without its graph."""
    return out.detach() if isinstance(out, torch.Tensor) else _mapped(out, detached)
