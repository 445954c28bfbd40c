"""Outputs of a model, whatever their structure: taken apart into tensors, put together from slices of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vram_guard.apply.loss_weight import weighted_sum
from vram_guard.apply.microbatch import MicroBatch
from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.state.containers import leaves, mapped


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


def last_of(outputs: Sequence[Any]) -> Any:
    """The last micro-batch's output stands for the whole batch's."""
    return outputs[-1]


def merged(
    outputs: Sequence[Any],
    parts: Sequence[MicroBatch],
    weights: Sequence[Any] | None = None,
    *,
    rows: bool = True,
    otherwise: Callable[[Sequence[Any]], Any] = last_of,
    name: str = "",
) -> Any:
    """Outputs of micro-batches as they would have been returned for the whole batch.

    Mappings are merged value by value. Tensors with a row per sample are joined; floating-point numbers become the
    mean over samples, and those whose name says that they are losses add up by their weights.

    Args:
        outputs: of the micro-batches, without graphs.
        parts: the micro-batches.
        weights: what their losses were multiplied with; None: as means over samples.
        rows: whether tensors may have a row per sample; where not, tensors of all shapes are numbers.
        otherwise: what becomes of anything else; the last micro-batch's, unless this says something different.
        name: of the value in a mapping.
    """
    if len(outputs) == 1 or all(output is None for output in outputs):
        return outputs[0]
    if all(isinstance(output, Mapping) for output in outputs):
        return {
            key: merged([o.get(key) for o in outputs], parts, weights, rows=rows, otherwise=otherwise, name=str(key))
            for key in dict.fromkeys(key for output in outputs for key in output)
        }
    shares = [part.weight for part in parts] if weights is None or "loss" not in name else weights
    if all(isinstance(output, torch.Tensor) for output in outputs):
        if rows and all(out.ndim and len(out) == part.samples for out, part in zip(outputs, parts, strict=True)):
            return torch.cat(list(outputs))
        if all(output.is_floating_point() and not (rows and output.ndim) for output in outputs):
            return weighted_sum(outputs, shares)
    elif all(isinstance(output, float) for output in outputs):
        return sum(output * float(share) for output, share in zip(outputs, shares, strict=True))
    return otherwise(outputs)


def _share_of(value: torch.Tensor, weight: Any) -> torch.Tensor:
    """A slice's part of a weighted mean; a slice of no weight has none, even where its own mean is undefined."""
    part: torch.Tensor = value * weight
    return torch.where(weight == 0, torch.zeros_like(part), part) if isinstance(weight, torch.Tensor) else part


# --- structures of outputs ----------------------------------------------------------------------------------

_TENSOR = object()


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    return [leaf for leaf in leaves(out) if isinstance(leaf, torch.Tensor)]


def detached(out: Any) -> Any:
    """The same output without its graph, which would keep its activations alive."""
    return mapped(out, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _without_tensors(out: Any) -> Any:
    return mapped(out, lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf)


def _with_tensors(like: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return mapped(like, lambda leaf: next(tensors) if leaf is _TENSOR else leaf)
